// The launcher of another host: what it does there.
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <optional>
#include <ostream>
#include <system_error>

#include "base/text.h"
#include "cluster/rendezvous.h"
#include "cluster/resolvers.h"
#include "cluster/store_backend.h"
#include "launch/host_part.h"
#include "launch/job_store.h"
#include "launch/launcher.h"
#include "launch/part_output.h"
#include "launch/reaper.h"
#include "launch/signals.h"
#include "launch/token_file.h"
#include "lockstep/base/error.h"
#include "transport/socket.h"

namespace lockstep::launch {
namespace {

constexpr std::chrono::seconds kToHearWhatToRun(60), kToStart(10);
constexpr double kUntilEtcdKnows = 30;  // seconds: by then its lease has ended, also where etcd had to elect a leader

bool answers(const std::function<Store()>& connect) {
  try {
    connect();
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

int launch_part() {
  const Reaper reaper;
  const Signals signals;
  ControlProtocol control;
  auto part = part_in(control.first(Deadline::after(kToHearWhatToRun)));
  std::error_code failed;
  std::filesystem::current_path(part.folder, failed);
  if (failed) throw IoError(text("host ", part.host, " has no folder ", part.folder, ": ", failed.message()));
  make_folder(part.log_dir);
  const TokenFile token(part.token);
  const bool in_etcd = cluster::is_etcd(part.store);
  const Access access{token.access().token, part.trusted_network};
  const auto connect = [&] { return Store::connect(part.store, Deadline::after(kForStore), access); };
  const auto tell = [&](int rank) { tell_that_it_ended(connect, rank); };
  const double silent_seconds = part.elastic ? kShortSilenceSeconds : kLongSilenceSeconds;
  PartOutput output(STDOUT_FILENO, control, silent_seconds), errors(STDERR_FILENO, control, silent_seconds);
  std::ostream out(&output), err(&errors);
  JobProcesses::Context context{signals, reaper, out, err, &control, tell};
  std::optional<Store> store;  // of this host
  context.launcher_lives = [&] { return in_etcd ? entry(*store, kEndOfLauncher).empty() : answers(connect); };
  if (part.elastic && in_etcd) store = Store::connect(part.store, Deadline::after(kToStart), access);
  if (part.elastic && !in_etcd) {
    const auto address =
        transport::address_towards(cluster::host_of(part.store, "the store's address"), Deadline::after(kToStart));
    store = Store::hold(transport::with_port(address, 0), access);
  }
  if (store) {
    const auto limit = Deadline::after(kToStart);
    part.host_store = store->address();
    const auto of_launcher = in_etcd ? *store : Store::connect(part.store, limit, access);
    of_launcher.set(cluster::kStoreOfHost + part.host, part.host_store, limit);
    if (!part.known_stores.empty()) {
      store->set(cluster::kKnownStores, join(part.known_stores, "\n"), limit);
      store->set(cluster::kJobHasBegun, "yes", limit);
    }
    use_store(context, *store);
  }
  const JobProcesses::Limits limits{.grace_seconds = part.grace_seconds,
                                    .restarts = part.restarts,
                                    .elastic = part.elastic,
                                    .until_launcher_is_lost = in_etcd ? kUntilEtcdKnows : 0};
  err << kPartIsHereMessage << std::flush;
  control.wait_for_begin(Deadline::after(kToHearWhatToRun));
  std::optional<JobProcesses> ranks;
  try {
    ranks.emplace(ranks_of(part, token.path()), limits, context);
  } catch (const Error&) {  // none was started, or is left
    err << ranks_ended_message(1) << std::flush;
    throw;
  }
  const int status = ranks->run();
  if (ranks->nobody_is_left()) err << kNobodyIsLeftMessage;
  err << ranks_ended_message(status) << std::flush;
  if (store && !in_etcd) hold_store(*store, control, signals);
  return status;
}

}  // namespace lockstep::launch
