#include "lockstep/parallel/device_mesh.h"

#include <gtest/gtest.h>

#include <thread>

#include "base/expect_says_testing.h"
#include "collective/on_ranks_testing.h"

namespace lockstep::parallel {
namespace {

TEST(DeviceMesh, HasACommunicatorForEachAxis) {
  collective::on_ranks(12, [](const Group& group) {
    const DeviceMesh mesh({{"data", 2}, {"pipeline", -1}, {"tensor", 2}}, group);
    EXPECT_EQ(mesh.size("pipeline"), 3);
    const int data = group.rank() / 6, pipeline = group.rank() / 2 % 3, tensor = group.rank() % 2;
    EXPECT_EQ(mesh.coordinate("data"), data);
    EXPECT_EQ(mesh.coordinate("pipeline"), pipeline);
    EXPECT_EQ(mesh.coordinate("tensor"), tensor);
    EXPECT_EQ(mesh.coordinates_of(group.rank()), mesh.coordinates_of(mesh.ranks().rank()));
    const auto neighbours = mesh["pipeline"].all_gather(std::to_string(group.rank()));
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(neighbours[static_cast<std::size_t>(i)], std::to_string(6 * data + 2 * i + tensor));
    }
  });
}

TEST(DeviceMesh, MakesRanksOfOneHostNeighboursOnTheLastAxis) {
  collective::on_ranks(4, [](const Group& group) {
    const std::string host = group.rank() % 2 == 0 ? "even" : "odd";
    const DeviceMesh mesh({{"data", 2}, {"tensor", 2}}, group, host);
    for (const auto& other : mesh["tensor"].all_gather(host)) EXPECT_EQ(other, host);
  });
}

TEST(DeviceMesh, RefusesAxesThatDoNotFit) {
  const auto refused = [](const std::vector<DeviceMesh::Axis>& axes, const std::string& message) {
    collective::on_ranks(4, [&](const Group& group) {
      expect_says(message_of<InvalidArgument>([&] { DeviceMesh(axes, group); }), message);
    });
  };
  refused({{"data", 2}, {"tensor", 3}}, "the product of the sizes is 6, but there are 4 ranks");
  refused({{"data", -1}, {"tensor", 3}}, "the number of ranks, 4, is not a multiple of 3");
  refused({{"data", -1}, {"tensor", -1}}, "the size of one axis alone may be -1");
  refused({{"data", 4}, {"tensor", 0}}, "axis \"tensor\" has size 0");
  refused({{"data", 4}, {"data", 1}}, "two axes are called \"data\"");
  refused({{"", 4}}, "axis 0 has no name");
}

TEST(DeviceMesh, NamesItsAxesWhereOneIsMissing) {
  collective::on_ranks(2, [](const Group& group) {
    const DeviceMesh mesh({{"data", 2}}, group);
    EXPECT_FALSE(mesh.contains("tensor"));
    expect_says(message_of<InvalidArgument>([&] { mesh["tensor"]; }),
                "there is no axis \"tensor\"; the mesh has data 2");
  });
}

// All ranks wait in one axis or another when a rank of the middle leaves.
TEST(DeviceMesh, AllRanksLearnWhichOneWasLost) {
  constexpr int kLost = 5;
  const auto groups = make_thread_groups(8);
  std::vector<std::string> errors(8);
  std::vector<int> named(8, -1);
  {
    std::vector<std::jthread> threads;
    for (std::size_t rank = 0; rank < 8; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          const DeviceMesh mesh({{"data", 2}, {"pipeline", 2}, {"tensor", 2}}, {groups[rank], 20});
          const auto link = mesh["pipeline"].group().split(0, mesh.coordinate("pipeline"), mesh["pipeline"].deadline());
          if (rank == kLost) throw Error("this rank ends");  // and leaves its Groups
          for (int i = 0; i < 1000; ++i) {
            for (const char* axis : {"data", "pipeline", "tensor"}) mesh[axis].group().barrier(mesh[axis].deadline());
            link->barrier(mesh["pipeline"].deadline());
          }
        } catch (const PeerLost& lost) {
          named[rank] = lost.rank();
          errors[rank] = lost.what();
        } catch (const Error& error) {
          errors[rank] = error.what();
        }
      });
    }
  }
  for (std::size_t rank = 0; rank < 8; ++rank) {
    if (rank == kLost) continue;
    EXPECT_EQ(named[rank], kLost) << errors[rank];
    expect_says(errors[rank], "(data 1, pipeline 0, tensor 1)");
  }
}

}  // namespace
}  // namespace lockstep::parallel
