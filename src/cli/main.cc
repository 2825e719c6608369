// The command `lockstep`: arguments -> a call, nothing else.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <set>

#include "base/text.h"
#include "cli/commands.h"
#include "cluster/launch/launcher.h"
#include "lockstep/base/error.h"
#include "lockstep/base/version.h"

namespace {

// Options of `lockstep bench collectives`.
struct BenchArguments {
  explicit BenchArguments(CLI::App& app) {
    app.add_option("operation", options.operation, "all_reduce, broadcast, all_gather, ... (all_reduce)");
    app.add_option("--backend", options.group.backend, "threads, shm, tcp, ucx, hierarchical, mpi or auto (auto)");
    app.add_option("--implementation", implementation,
                   "auto, ring, halving_doubling, tree, pairwise, reduction_to_one_device");
    app.add_option("--ranks", options.ranks, "how many ranks (2); mpi: as many as its launcher has started");
    app.add_option("--sizes", options.sizes, "bytes, separated by commas")->delimiter(',');
    app.add_option("--dtype", options.dtype, "float32, float64, int32, int64 or uint8 (float32)");
    app.add_option("--seconds", options.seconds, "about how long each size is measured (0.5)");
    app.add_flag("--any-buffer", options.any_buffer, "memory that the group did not allocate");
    app.add_option("--ranks-per-host", options.ranks_per_host, "ranks that are said to share a host (all)");
    rank = app.add_option("--rank", world.rank, "be this rank of a run whose store is at --store");
    app.add_option("--store", options.store, "host:port")->needs(rank);
    app.add_flag("--hold-store", options.hold_store, "hold the store at --store in this process")->needs(rank);
    app.add_option("--host", world.host, "ranks with the same name share memory")->needs(rank);
    app.add_option("--address", world.address, "where this rank listens for other hosts (127.0.0.1)")->needs(rank);
  }

  lockstep::cli::BenchOptions finished(std::vector<std::string> command) {
    options.group.implementation = lockstep::implementation_named(implementation);
    options.command = std::move(command);
    world.size = options.ranks;
    if (*rank) options.world = world;
    return options;
  }

  std::string speaker() const { return *rank ? "rank " + std::to_string(world.rank) + ": " : ""; }

  lockstep::cli::BenchOptions options;
  lockstep::World world;
  std::string implementation = "auto";
  CLI::Option* rank = nullptr;
};

// The arguments that say where processes run.
struct PlaceArguments {
  explicit PlaceArguments(CLI::App& app) {
    app.add_option("-n", options.processes, "processes (1; with hosts: one a slot)");
    auto* const list = app.add_option("-H", hosts, "host1:4,host2:4: hosts, and how many processes each may run");
    app.add_option("--hostfile", hostfile, "a file with a host a line: host slots=4")->excludes(list);
    app.add_option("--ssh", options.ssh, "how other hosts are reached (ssh, without a terminal, with timeouts)");
  }

  lockstep::launch::LaunchOptions finished(std::vector<std::string> command) {
    if (!hosts.empty()) options.hosts = lockstep::launch::parse_hosts(hosts);
    if (!hostfile.empty()) options.hosts = lockstep::launch::read_hostfile(hostfile);
    options.command = std::move(command);
    return options;
  }

  lockstep::launch::LaunchOptions options;
  std::string hosts, hostfile;
};

struct RunArguments : PlaceArguments {
  explicit RunArguments(CLI::App& app) : PlaceArguments(app) {
    app.add_option("-x", exported, "NAME or NAME=VALUE: a variable for the processes of other hosts")
        ->allow_extra_args(false);
    app.add_option("--workers", options.workers, "workers of a job with parameter servers, in place of -n (0)");
    app.add_option("--ps", options.servers, "its parameter servers (0); it also has a chief");
    app.add_flag("--evaluator", options.evaluator, "and a process that evaluates checkpoints");
    app.add_option("--min-n", options.min_processes,
                   "the job goes on without processes that fail while so many are left; for programs that regroup "
                   "(0: it ends with the first)");
    app.add_option("--host-discovery", options.host_discovery,
                   "a program that prints the hosts that there are, one a line: they may come and go; with --min-n");
    app.add_option("--max-n", options.max_processes, "likewise: the most processes at a time (0: no bound)");
    app.add_option("--blacklist-cooldown", options.blacklist_seconds,
                   "likewise: seconds for which a host that failed is left out, twice as long each further time (10)");
    app.add_option("--nnodes", nodes,
                   "4, or 1:4: this is started on each of so many hosts, with -n processes on each; hosts may be lost, "
                   "and others join later; with --store, and LOCKSTEP_TOKEN_FILE");
    app.add_option("--last-call", last_call_seconds,
                   "likewise: how many seconds the fewest nodes wait for more before the job begins (30)");
    app.add_option(
        "--store", options.store,
        "host:port, or etcd://host:port,host:port,host:port/job: where nodes find each other; of etcd also for "
        "jobs with --min-n, any of whose hosts may then be lost");
    app.add_flag("--trusted-network", options.trusted_network,
                 "allow links without proof of belonging to the job, which UCX needs: whoever reaches the network is "
                 "trusted");
    app.add_option("--certs", options.certificates,
                   "a folder that `lockstep certs` made, at the same path on all hosts: calls between the processes "
                   "of a job with parameter servers use TLS");
    app.add_option("--log-dir", options.log_dir, "each rank's output goes to rank-<n>.log there too");
    app.add_option("--timeline", options.timeline,
                   "what all ranks' operations took, for ui.perfetto.dev, in this file");
    app.add_option(
        "--restarts", options.restarts,
        "how often the job starts again after a failure; with parameter servers, its workers, servers and chief; with "
        "--min-n, processes that join the others (0)");
    app.add_option("--grace", options.grace_seconds, "seconds from SIGTERM to SIGKILL (10)");
    app.add_flag("--part", part, "be the part of a job on this host, for a launcher on another")->group("");
    app.prefix_command();
    app.footer("The program and its arguments come last: lockstep run -n 4 ./train --epochs 12");
  }

  int act(std::vector<std::string> command) {
    if (part) return lockstep::launch::launch_part();
    options.environment = lockstep::launch::exported_variables(exported);
    if (!nodes.empty()) {
      const auto [fewest, most] = lockstep::launch::parse_nodes(nodes);
      options.nodes = {.fewest = fewest, .most = most, .last_call_seconds = last_call_seconds};
    }
    return lockstep::launch::launch(finished(std::move(command)), std::cout, std::cerr);
  }

  std::vector<std::string> exported;
  std::string nodes;
  double last_call_seconds = lockstep::launch::NodeLimits().last_call_seconds;
  bool part = false;
};

// A job whose program is this one.
struct DoctorArguments : PlaceArguments {
  explicit DoctorArguments(CLI::App& app) : PlaceArguments(app) {
    app.add_flag("--examine", examines, "be one of its processes")->group("");
  }

  int act() {
    if (examines) return lockstep::cli::examine(lockstep::resolve_cluster(), std::cout);
    const auto program = std::filesystem::read_symlink("/proc/self/exe").string();
    const int status = lockstep::launch::launch(finished({program, "doctor", "--examine"}), std::cout, std::cerr);
    std::cout << "TPU: " << lockstep::cli::find_tpu() << "\n";
    return status;
  }

  bool examines = false;
};

// Accepts what other launchers do: -np for -n, and -- before the program. The program's own arguments stay as they are.
std::vector<std::string> as_run_takes_it(int argc, char** argv) {
  std::vector<std::string> all(argv + 1, argv + argc);
  const std::set<std::string> flags{"--trusted-network", "--evaluator", "--part", "--help", "-h"};
  if (all.empty() || all[0] != "run") return all;
  for (std::size_t i = 1; i < all.size() && all[i].starts_with("-"); ++i) {
    if (all[i] == "-np") all[i] = "-n";
    if (all[i] == "--") {
      all.erase(all.begin() + static_cast<std::ptrdiff_t>(i));
      break;
    }
    const bool is_long = all[i].starts_with("--");
    const bool has_value_with_it = is_long ? all[i].find('=') != std::string::npos : all[i].size() > 2;
    if (!flags.contains(all[i]) && !has_value_with_it) ++i;
  }
  return all;
}

const auto kEvery = [](const CLI::App*) { return true; };

// An option without its value would be as one that was not given.
void require_values(CLI::App& app) {
  const CLI::Validator has_value(
      [](std::string& value) { return std::string(value.empty() ? "its value is empty" : ""); }, "");
  for (auto* const option : app.get_options()) {
    if (option->get_items_expected_max() > 0) option->check(has_value);
  }
  for (auto* const command : app.get_subcommands(kEvery)) require_values(*command);
}

// A message for the first argument that the command does not know, with those that may have been meant. Or one for a
// missing command of its own. Empty: there is neither.
std::string wrong_argument(const CLI::App& app, const std::string& path, const std::string& program) {
  using lockstep::text, lockstep::join;
  std::vector<std::string> commands, options;
  for (const auto* const command : app.get_subcommands(kEvery)) commands.push_back(command->get_name());
  for (const auto* const option : app.get_options()) {
    const bool is_hidden = option->get_group().empty();
    if (!is_hidden) options.insert(options.end(), option->get_lnames().begin(), option->get_lnames().end());
  }
  const auto usage = text("\nUsage: ", path, commands.empty() ? "" : text(" COMMAND (", join(commands), ")"),
                          " [OPTIONS]", program, "\n", path, " --help lists them.\n");
  const auto arguments = app.remaining();
  if (arguments.empty()) return commands.empty() ? "" : text(path, ": a command is missing", usage);
  const auto& first = arguments[0];
  const bool is_option = first.size() > 1 && first[0] == '-';
  if (!is_option && !program.empty()) return "";
  const auto name = is_option ? first.substr(0, first.find('=')) : first;
  const auto known = name.substr(std::min(name.size(), name.find_first_not_of('-')));
  auto near = lockstep::near_names(known, is_option ? options : commands);
  for (auto& each : near) each.insert(0, is_option ? "--" : "");
  return text(path, ": there is no ",
              is_option          ? "option "
              : commands.empty() ? "argument "
                                 : "command ",
              name, near.empty() ? "" : text(" (near: ", join(near), ")"), usage);
}

// A message for the arguments of the command that was named last, as above.
std::string wrong_argument(const CLI::App& app) {
  const auto* command = &app;
  std::string path = app.get_name();
  while (!command->get_subcommands().empty()) {
    command = command->get_subcommands().back();
    path += " " + command->get_name();
  }
  return wrong_argument(*command, path, command->get_prefix_command() ? " PROGRAM [ARGUMENTS]" : "");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Lockstep: distributed training for LibTorch", "lockstep");
  app.set_version_flag("--version", lockstep::version());
  app.require_subcommand(1);

  auto* devices = app.add_subcommand("devices", "how many replicas this machine would train with, and why");
  auto* inspect = app.add_subcommand("inspect", "the contents of a checkpoint, with its checksum verified");
  std::string path;
  inspect->add_option("checkpoint", path, "a .safetensors file, or a folder whose latest checkpoint is meant")
      ->required();
  auto* bench = app.add_subcommand("bench", "measures what this machine and its links give");
  bench->require_subcommand(1);
  auto* collectives = bench->add_subcommand("collectives", "time and bandwidth of a group's operations, by size");
  BenchArguments bench_arguments(*collectives);
  auto* run = app.add_subcommand("run", "starts a program as the processes of one job, and ends them together");
  RunArguments run_arguments(*run);
  auto* certs = app.add_subcommand("certs", "certificates for the processes of one job with parameter servers");
  std::string certificates;
  int days = 365;
  certs->add_option("folder", certificates, "where ca.pem, cert.pem and key.pem are written")->required();
  certs->add_option("--days", days, "for how long they are valid (365)");
  auto* doctor = app.add_subcommand("doctor", "whether a job can run here, or on the hosts that are named");
  DoctorArguments doctor_arguments(*doctor);
  auto* compile_for = app.add_subcommand(
      "compile-for", "compiles a program's first step for a TPU that is not here: what memory it needs");
  std::string chips;
  compile_for
      ->add_option("chips", chips,
                   "a topology as libtpu names it: v5e:2x2, v5e:2x4, v5e:4x4, v6e:2x4, v5p:2x2x1, v4:2x2x1, ...")
      ->required();
  compile_for->prefix_command();
  compile_for->footer("The program and its arguments come last: lockstep compile-for v5e:2x4 ./train --epochs 12");
  auto arguments = as_run_takes_it(argc, argv);
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
  require_values(app);
  constexpr int kWrongArguments = 2;
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    const auto wrong = error.get_exit_code() == 0 ? "" : wrong_argument(app);
    if (wrong.empty()) return app.exit(error);
    std::cerr << wrong;
    return kWrongArguments;
  }
  if (const auto wrong = wrong_argument(app); !wrong.empty()) {
    std::cerr << wrong;
    return kWrongArguments;
  }

  try {
    if (*devices) lockstep::cli::print_devices(std::cout);
    if (*inspect) lockstep::cli::print_checkpoint(path, std::cout);
    if (*certs) {
      lockstep::cli::make_certificates(certificates, days);
      std::cout << certificates << ": ca.pem, cert.pem and key.pem, valid for " << days
                << " days; copy the folder to all hosts of the job, and start it with lockstep run --certs "
                << certificates << "\n";
    }
    if (*run) return run_arguments.act(run->remaining());
    if (*compile_for) return lockstep::cli::compile_for(chips, compile_for->remaining(), std::cout);
    if (*doctor) return doctor_arguments.act();
    if (*collectives) return lockstep::cli::bench_collectives(bench_arguments.finished({argv, argv + argc}), std::cout);
  } catch (const std::exception& error) {
    // Written in one piece, for several ranks may write at once.
    std::cerr << "lockstep: " + bench_arguments.speaker() + error.what() + "\n";
    return 1;
  }
}
