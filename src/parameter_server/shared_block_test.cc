#include "parameter_server/shared_block.h"

#include <gtest/gtest.h>

#include <cstring>

namespace lockstep::parameter_server {
namespace {

TEST(SharedBlock, WhoHasTheHandleSeesTheBytes) {
  const auto mine = SharedBlock::make(10'000);
  const auto theirs = SharedBlock::open(mine->handle());
  ASSERT_NE(theirs, nullptr);
  EXPECT_NE(theirs->begin(), mine->begin());
  EXPECT_EQ(theirs->bytes(), 10'000U);
  EXPECT_EQ(mine->begin()[9'999], std::byte{0});
  std::memset(mine->begin(), 7, 10'000);
  EXPECT_EQ(theirs->begin()[9'999], std::byte{7});
  theirs->begin()[0] = std::byte{8};
  EXPECT_EQ(mine->begin()[0], std::byte{8});
}

TEST(SharedBlock, OffsetsStayInside) {
  const auto block = SharedBlock::make(100);
  EXPECT_EQ(block->offset_of(block->begin() + 20, 80), 20);
  EXPECT_EQ(block->offset_of(block->begin() + 20, 81), -1);
  EXPECT_EQ(block->offset_of(block->begin() - 1, 1), -1);
  EXPECT_EQ(block->at(20, 80), block->begin() + 20);
  for (const auto& [offset, bytes] :
       std::vector<std::pair<std::int64_t, std::size_t>>{{20, 81}, {-1, 1}, {101, 0}, {1, SIZE_MAX}, {INT64_MAX, 1}}) {
    EXPECT_EQ(block->at(offset, bytes), nullptr) << offset << " " << bytes;
  }
}

TEST(SharedBlock, AnotherFileIsNone) {
  const auto mine = SharedBlock::make(100);
  auto handle = mine->handle();
  handle.nonce[3] ^= 1;
  EXPECT_EQ(SharedBlock::open(handle), nullptr);  // as of a process with this number on another host
  handle = mine->handle();
  handle.bytes = 200;
  EXPECT_EQ(SharedBlock::open(handle), nullptr);
  handle = mine->handle();
  handle.descriptor = 0;
  EXPECT_EQ(SharedBlock::open(handle), nullptr);
  handle.process = -5;
  EXPECT_EQ(SharedBlock::open(handle), nullptr);
  handle = mine->handle();
  handle.bytes = UINT64_MAX - 10;
  EXPECT_EQ(SharedBlock::open(handle), nullptr);
}

}  // namespace
}  // namespace lockstep::parameter_server
