#include "parameter_server/service.h"

#include <exception>
#include <future>

#include "base/process.h"
#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::parameter_server {

const ServiceEngine& service_engine() {
  static const ServiceEngine* const engine = function_of_plugin<ClusterError, const ServiceEngine*()>(
      {"grpc", "parameter servers", "LOCKSTEP_GRPC"}, "lockstep_grpc_engine")();
  return *engine;
}

namespace {

class TwoCopies final : public ServerConnection {
 public:
  TwoCopies(std::shared_ptr<ServerConnection> first, std::shared_ptr<ServerConnection> second)
      : first_(std::move(first)), second_(std::move(second)) {}

  void open(const std::string& description, Deadline deadline) override {
    first_->open(description, deadline);
    second_->open(description, deadline);
  }

  bool share(std::shared_ptr<SharedBlock> block, Deadline deadline) override {
    const bool with_first = first_->share(block, deadline);
    return second_->share(block, deadline) && with_first;
  }

  std::int64_t push(Push push, Deadline deadline) override {
    return change([&](ServerConnection& copy) { return copy.push(push, deadline); }, deadline);
  }

  void pull(std::span<std::byte* const> shards, std::vector<std::int64_t>& versions, Deadline deadline) override {
    first_->pull(shards, versions, deadline);
  }

  void pull_rows(std::size_t table, std::span<const std::int64_t> ids, std::span<std::byte> values,
                 Deadline deadline) override {
    first_->pull_rows(table, ids, values, deadline);
  }

  std::int64_t write(std::span<const std::byte* const> shards, Deadline deadline) override {
    return change([&](ServerConnection& copy) { return copy.write(shards, deadline); }, deadline);
  }

  bool cut(std::int64_t end, Deadline deadline) override { return first_->cut(end, deadline); }

  std::optional<std::int64_t> save(std::int64_t end, const std::string& file, Deadline deadline) override {
    return first_->save(end, file, deadline);
  }

  std::int64_t restore(const std::string& checkpoint, std::optional<std::int64_t> chief, Deadline deadline) override {
    return change([&](ServerConnection& copy) { return copy.restore(checkpoint, chief, deadline); }, deadline);
  }

 private:
  // Calls act(copy) for both until both name one transfer as the last before the change. Then a server that later gets
  // its state from the other gets the change too. Throws IncompleteUpdate where one of them has the change.
  template <class Act>
  std::int64_t change(const Act& act, Deadline deadline) const {
    while (true) {
      std::exception_ptr failure;
      std::string why;
      const auto result_of = [&](const auto& call) -> std::optional<std::int64_t> {
        try {
          return call();
        } catch (const std::exception& error) {
          failure = std::current_exception();
          why = error.what();
          return std::nullopt;
        }
      };
      auto running = std::async(std::launch::async, [&] { return act(*second_); });
      const auto first = result_of([&] { return act(*first_); });
      const auto second = result_of([&] { return running.get(); });
      if (!first && !second) std::rethrow_exception(failure);
      if (failure) throw IncompleteUpdate(text("one of two copies has the change: ", why));
      if (first == second) return *first;
      if (deadline.passed()) throw DeadlineExceeded("updating both copies of shards", deadline.waited());
    }
  }

  const std::shared_ptr<ServerConnection> first_, second_;
};

}  // namespace

std::shared_ptr<ServerConnection> connect_two_copies(std::shared_ptr<ServerConnection> first,
                                                     std::shared_ptr<ServerConnection> second) {
  return std::make_shared<TwoCopies>(std::move(first), std::move(second));
}

}  // namespace lockstep::parameter_server
