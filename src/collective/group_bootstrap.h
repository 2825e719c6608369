// Members of a new group find each other over a group that all of them are in.
#pragma once

#include <algorithm>
#include <cstring>

#include "cluster/bootstrap.h"
#include "lockstep/collective/group.h"

namespace lockstep::collective {

class GroupBootstrap final : public cluster::Bootstrap {
 public:
  // `members`: ranks in `group`, in the order of their new ranks; this rank is one of them.
  GroupBootstrap(const Group& group, std::vector<int> members, std::int64_t generation)
      : group_(group), members_(std::move(members)), generation_(generation) {}

  int rank() const override {
    return static_cast<int>(std::find(members_.begin(), members_.end(), group_.rank()) - members_.begin());
  }
  int size() const override { return static_cast<int>(members_.size()); }
  std::int64_t generation() const override { return generation_; }

  // The first member gathers the texts and sends them to all.
  std::vector<std::string> all_gather(const std::string& mine, Deadline deadline) override {
    std::vector<std::string> all(members_.size());
    if (rank() != 0) {
      send(mine, members_[0], deadline);
      for (auto& text : all) text = recv(members_[0], deadline);
      return all;
    }
    all[0] = mine;
    for (std::size_t i = 1; i < all.size(); ++i) all[i] = recv(members_[i], deadline);
    for (std::size_t i = 1; i < all.size(); ++i) {
      for (const auto& text : all) send(text, members_[i], deadline);
    }
    return all;
  }

 private:
  void send(std::string text, int to, Deadline deadline) const {
    std::int64_t length = static_cast<std::int64_t>(text.size());
    group_.send(buffer_of(std::span(&length, 1)), to, deadline);
    group_.send({text.data(), text.size(), DType::uint8}, to, deadline);
  }

  std::string recv(int from, Deadline deadline) const {
    std::int64_t length = 0;
    group_.recv(buffer_of(std::span(&length, 1)), from, deadline);
    std::string text(static_cast<std::size_t>(length), '\0');
    group_.recv({text.data(), text.size(), DType::uint8}, from, deadline);
    return text;
  }

  const Group& group_;
  const std::vector<int> members_;
  const std::int64_t generation_;
};

}  // namespace lockstep::collective
