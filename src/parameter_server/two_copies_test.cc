#include "parameter_server/service.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>

#include "base/expect_says_testing.h"
#include "lockstep/base/error.h"
#include "parameter_server/connection_in_process_testing.h"

namespace lockstep::parameter_server {
namespace {

const std::vector<VariableSpec> kCopiedVariables{{"v", DType::float64, {1}}};

std::shared_ptr<ShardStore> make_store() {
  return std::make_shared<ShardStore>(ModelSpec{kCopiedVariables}, place_shards(kCopiedVariables, {}, 1),
                                      ServerNumber(), SGD({.learning_rate = 1}), UpdateMode());
}

// A server in this process, to which something may happen before or after it takes a push.
class Server final : public ConnectionInProcess {
 public:
  Server() : ConnectionInProcess(make_store()) {}
  std::function<void()> before, after;
  int pushes = 0;

  double value() const {
    double value = 0;
    store->shard(0).read(reinterpret_cast<std::byte*>(&value));
    return value;
  }

  // Starts the server again, with the state of the other server.
  void restart(Server& other, std::int64_t transfer) {
    std::vector<std::byte> bytes;
    StateWriter writer([&](std::span<const std::byte> data) { bytes.insert(bytes.end(), data.begin(), data.end()); });
    other.store->send(transfer, writer);
    store = make_store();
    std::size_t at = 0;
    StateReader reader([&](std::span<std::byte> data) {
      std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), data.size(), data.begin());
      at += data.size();
    });
    store->receive(reader);
  }

  std::int64_t push(Push push, Deadline) override {
    ++pushes;
    return change([&] { return store->push(push); });
  }
  std::int64_t write(std::span<const std::byte* const> values, Deadline) override {
    return change([&] { return store->write(values); });
  }

 private:
  template <class Act>
  std::int64_t change(const Act& act) {
    if (auto happens = std::exchange(before, {})) happens();
    const auto transfer = act();
    if (auto happens = std::exchange(after, {})) happens();
    return transfer;
  }
};

class TwoCopies : public testing::Test {
 protected:
  void push(std::int64_t step) {
    const double gradient = -1;
    copies_->push(
        {.task = {step}, .weight = 1, .gradients = {reinterpret_cast<const std::byte*>(&gradient)}, .rows = {}},
        Deadline::after(std::chrono::seconds(10)));
  }
  void expect(double value) const {
    EXPECT_EQ(first_->value(), value);
    EXPECT_EQ(second_->value(), value);
  }

  const std::shared_ptr<Server> first_ = std::make_shared<Server>(), second_ = std::make_shared<Server>();
  std::int64_t transfers_ = 0;
  const std::shared_ptr<ServerConnection> copies_ = connect_two_copies(first_, second_);
};

TEST_F(TwoCopies, BothMakeEachUpdateOnce) {
  for (int step = 0; step < 3; ++step) push(step), push(step);
  expect(3);
  EXPECT_EQ(first_->pushes, 6);
}

// One acknowledges a push, is lost, and gets its state from the other before that one has the push.
TEST_F(TwoCopies, AnUpdateThatTheLostServerAloneHadIsRepeated) {
  for (auto [lost, other] : {std::pair(first_, second_), std::pair(second_, first_)}) {
    const auto before = lost->value();
    std::atomic<bool> acknowledged = false;
    lost->after = [&] { acknowledged = true; };
    const auto number = static_cast<std::int64_t>(before) + 1;
    other->before = [&, lost = lost, other = other] {
      while (!acknowledged) std::this_thread::yield();
      lost->restart(*other, number);
      EXPECT_EQ(lost->value(), before);
    };
    push(number);
    expect(before + 1);
    push(number + 10);
    push(number + 20);
    expect(before + 3);
    EXPECT_EQ(first_->pushes, second_->pushes);
  }
}

// The transfer has the update.
TEST_F(TwoCopies, AnUpdateThatBothHadIsNotMadeTwice) {
  push(0);
  second_->restart(*first_, 1);
  expect(1);
  push(0);
  push(1);
  expect(2);
}

// The state that the lost server gets does not have the values yet, as with a push.
TEST_F(TwoCopies, ValuesThatTheLostServerAloneHadAreWrittenAgain) {
  for (auto [lost, other] : {std::pair(first_, second_), std::pair(second_, first_)}) {
    std::atomic<bool> acknowledged = false;
    lost->after = [&] { acknowledged = true; };
    other->before = [&, lost = lost, other = other] {
      while (!acknowledged) std::this_thread::yield();
      lost->restart(*other, ++transfers_);
    };
    const double value = 5 + static_cast<double>(transfers_);
    copies_->write(std::vector{reinterpret_cast<const std::byte*>(&value)}, Deadline::after(std::chrono::seconds(10)));
    expect(value);
  }
}

TEST_F(TwoCopies, AChangeThatOneCopyLacksIsSaid) {
  second_->before = [] { throw DeadlineExceeded("calling ps 1", std::chrono::seconds(1)); };
  expect_says(message_of<IncompleteUpdate>([&] { push(0); }), "one of two copies has the change: calling ps 1");
  push(0);
  expect(1);
  first_->before = second_->before = [] { throw DeadlineExceeded("calling ps 1", std::chrono::seconds(1)); };
  EXPECT_THROW(push(1), DeadlineExceeded);
}

TEST_F(TwoCopies, CopiesThatNeverAgreeEndAtTheDeadline) {
  second_->restart(*first_, 1);
  first_->store = make_store();
  const double gradient = -1;
  expect_says(message_of<DeadlineExceeded>([&] {
                copies_->push({.task = {0}, .weight = 1, .gradients = {reinterpret_cast<const std::byte*>(&gradient)}},
                              Deadline::after(std::chrono::milliseconds(50)));
              }),
              "updating both copies of shards");
}

}  // namespace
}  // namespace lockstep::parameter_server
