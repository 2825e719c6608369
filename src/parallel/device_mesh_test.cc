#include "lockstep/parallel/device_mesh.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace lockstep::parallel
