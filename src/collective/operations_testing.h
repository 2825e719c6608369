// For tests: every operation, dtype and operator against a plain loop. Each rank calls these functions.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "base/text.h"
#include "collective/ranks_testing.h"
#include "kernels/half.h"

namespace lockstep::collective {

using Bytes = std::vector<std::byte>;
using Values = std::vector<double>;

template <class Visit>
void visit_dtype(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::float32: return visit(float());
    case DType::float64: return visit(double());
    case DType::float16: return visit(kernels::Float16(0.0f));
    case DType::bfloat16: return visit(kernels::BFloat16(0.0f));
    case DType::int32: return visit(std::int32_t());
    case DType::int64: return visit(std::int64_t());
    case DType::uint8:
    case DType::boolean: return visit(std::uint8_t());
    case DType::int8: return visit(std::int8_t());
    case DType::int16: return visit(std::int16_t());
  }
}

template <class T>
T encoded(double value) {
  if constexpr (std::is_class_v<T>) return T(static_cast<float>(value));
  if constexpr (std::is_integral_v<T>) return static_cast<T>(static_cast<std::int64_t>(value));
  if constexpr (std::is_floating_point_v<T>) return static_cast<T>(value);
}

inline Bytes encode(DType dtype, const Values& values) {
  Bytes bytes(values.size() * size_of(dtype));
  visit_dtype(dtype, [&]<class T>(T) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const T element = encoded<T>(values[i]);
      std::memcpy(bytes.data() + i * sizeof(T), &element, sizeof(T));
    }
  });
  return bytes;
}

// Small whole numbers: every order of adding gives one sum, and every dtype can hold it.
inline double input(int rank, std::size_t i, ReduceOp op) {
  const auto mixed = (static_cast<std::size_t>(rank) * 7 + i * 5 + i / 3) % 6;
  return op == ReduceOp::product ? static_cast<double>(mixed % 2 + 1) : static_cast<double>(mixed);
}

inline Values inputs(int rank, std::size_t count, ReduceOp op = ReduceOp::sum) {
  Values values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = input(rank, i, op);
  return values;
}

inline double reduced(ReduceOp op, int size, std::size_t i) {
  double value = input(0, i, op);
  for (int r = 1; r < size; ++r) {
    const double next = input(r, i, op);
    switch (op) {
      case ReduceOp::sum:
      case ReduceOp::mean: value += next; break;
      case ReduceOp::min: value = std::min(value, next); break;
      case ReduceOp::max: value = std::max(value, next); break;
      case ReduceOp::product: value *= next; break;
    }
  }
  return op == ReduceOp::mean ? value / size : value;
}

inline Values reductions(ReduceOp op, int size, std::size_t begin, std::size_t end) {
  Values values;
  for (std::size_t i = begin; i < end; ++i) values.push_back(reduced(op, size, i));
  return values;
}

// Memory of the group's own every other time, so that both kinds are seen.
class Field {
 public:
  Field(const Group& group, DType dtype, const Values& values, bool shared) : bytes_(encode(dtype, values)) {
    if (shared) {
      memory_ = group.allocate(bytes_.size());
      std::copy(bytes_.begin(), bytes_.end(), memory_.get());
    }
    buffer_ = {shared ? memory_.get() : bytes_.data(), values.size(), dtype};
  }

  const Buffer& buffer() const { return buffer_; }
  Bytes content() const {
    const auto* const data = static_cast<const std::byte*>(buffer_.data);
    return {data, data + buffer_.bytes()};
  }
  bool holds(const Values& expected) const { return content() == encode(buffer_.dtype, expected); }

 private:
  Bytes bytes_;
  Memory memory_;
  Buffer buffer_;
};

// Sanitizers make the test's own loops slow: fewer ranks and shorter buffers find the same races.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr int kMostRanks = 4;
inline constexpr std::size_t kLong = 1000, kLongest = 9000;
#else
inline constexpr int kMostRanks = 9;
inline constexpr std::size_t kLong = 1000, kLongest = 70001;
#endif

inline constexpr DType kDtypes[] = {DType::float32, DType::float64, DType::float16, DType::bfloat16, DType::int32,
                                    DType::int64,   DType::uint8,   DType::int8,    DType::int16};
inline constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::mean, ReduceOp::min, ReduceOp::max, ReduceOp::product};

// 0, 1, fewer than ranks, what does not divide, and what needs several windows or slices.
inline std::vector<std::size_t> counts_for(int size) {
  return {0, 1, 2, static_cast<std::size_t>(size) * 5 + 3, kLong, kLongest};
}

inline void check_reductions(const Group& group) {
  int number = 0;
  for (const auto count : counts_for(group.size())) {
    for (const auto dtype : kDtypes) {
      for (const auto op : kOps) {
        if (count >= kLong && op != ReduceOp::sum && dtype != DType::float32) continue;  // the same code, and slow
        const bool shared = ++number % 2 == 0;
        const int root = number % group.size();
        const auto mine = inputs(group.rank(), count, op);
        const auto trace = [&](const char* what) {
          return text(what, " of ", count, " ", lockstep::name_of(dtype), " ", lockstep::name_of(op));
        };
        const Field all(group, dtype, mine, shared);
        group.all_reduce(all.buffer(), op, soon());
        ASSERT_TRUE(all.holds(reductions(op, group.size(), 0, count))) << trace("all_reduce");

        const Field given(group, dtype, mine, shared), got(group, dtype, Values(count), !shared);
        group.run(Call::reduce(given.buffer(), got.buffer(), op, root), soon());
        ASSERT_TRUE(got.holds(group.rank() == root ? reductions(op, group.size(), 0, count) : Values(count)))
            << trace("reduce");
        ASSERT_TRUE(given.holds(mine)) << trace("reduce, input");

        const auto whole = count * static_cast<std::size_t>(group.size());
        const Field parts(group, dtype, inputs(group.rank(), whole, op), shared);
        const Field part(group, dtype, Values(count), shared);
        group.reduce_scatter(parts.buffer(), part.buffer(), op, soon());
        const auto begin = count * static_cast<std::size_t>(group.rank());
        ASSERT_TRUE(part.holds(reductions(op, group.size(), begin, begin + count))) << trace("reduce_scatter");
      }
    }
  }
}

// Rank r's share where shares differ: some are empty.
inline std::size_t uneven(int rank, std::size_t count) {
  return count * static_cast<std::size_t>(rank % 3) + static_cast<std::size_t>(rank == 1);
}

inline void check_distributions(const Group& group) {
  const auto ranks = static_cast<std::size_t>(group.size());
  const auto me = static_cast<std::size_t>(group.rank());
  int number = 0;
  for (const auto count : counts_for(group.size())) {
    {
      const bool shared = ++number % 2 == 0;
      const auto dtype = std::array{DType::float32, DType::uint8, DType::float64}[count % 3];
      const int root = number % group.size();
      const auto field = [&](const Values& values) { return Field(group, dtype, values, shared); };
      const bool at_root = group.rank() == root;

      const auto cast = field(at_root ? inputs(root, count) : Values(count));
      group.broadcast(cast.buffer(), root, soon());
      ASSERT_TRUE(cast.holds(inputs(root, count))) << "broadcast";

      for (const bool even : {true, false}) {
        Counts shares;
        for (int r = 0; r < group.size(); ++r) shares.push_back(even ? count : uneven(r, count));
        const Counts given = even ? Counts() : shares;
        Values everybody;
        std::vector<std::size_t> begin;
        for (int r = 0; r < group.size(); ++r) {
          begin.push_back(everybody.size());
          const auto theirs = inputs(r, shares[static_cast<std::size_t>(r)]);
          everybody.insert(everybody.end(), theirs.begin(), theirs.end());
        }
        const auto mine = field(inputs(group.rank(), shares[me]));
        const auto gathered = field(Values(everybody.size()));
        group.run(Call::all_gather(mine.buffer(), gathered.buffer(), given), soon());
        ASSERT_TRUE(gathered.holds(everybody)) << "all_gather " << even;

        const auto at_one = field(Values(everybody.size()));
        group.run(Call::gather(mine.buffer(), at_one.buffer(), root, given), soon());
        ASSERT_TRUE(at_one.holds(at_root ? everybody : Values(everybody.size()))) << "gather " << even;

        const auto spread = field(at_root ? everybody : Values(everybody.size()));
        const auto got = field(Values(shares[me]));
        group.run(Call::scatter(spread.buffer(), got.buffer(), root, given), soon());
        ASSERT_TRUE(got.holds(inputs(group.rank(), shares[me]))) << "scatter " << even;

        const auto summands = field(inputs(group.rank(), everybody.size()));
        const auto sum = field(Values(shares[me]));
        group.run(Call::reduce_scatter(summands.buffer(), sum.buffer(), ReduceOp::max, given), soon());
        ASSERT_TRUE(sum.holds(reductions(ReduceOp::max, group.size(), begin[me], begin[me] + shares[me])))
            << "reduce_scatter " << even;

        // Rank a sends shares[(a + b) % ranks] elements, 10 a + b of them modulo 100, to rank b.
        const auto amount = [&](std::size_t a, std::size_t b) { return shares[(a + b) % ranks]; };
        const auto parcel = [&](std::size_t a, std::size_t b) {
          return Values(amount(a, b), static_cast<double>((10 * a + b) % 100));
        };
        Values sent, expected;
        Counts out, in;
        for (std::size_t r = 0; r < ranks; ++r) {
          const auto to = parcel(me, r), from = parcel(r, me);
          sent.insert(sent.end(), to.begin(), to.end());
          expected.insert(expected.end(), from.begin(), from.end());
          out.push_back(to.size());
          in.push_back(from.size());
        }
        const auto outgoing = field(sent), incoming = field(Values(expected.size()));
        group.run(Call::all_to_all(outgoing.buffer(), incoming.buffer(), even ? Counts() : out, even ? Counts() : in),
                  soon());
        ASSERT_TRUE(incoming.holds(expected)) << "all_to_all " << even;
      }
      group.barrier(soon());
    }
  }
}

inline void check_messages(const Group& group) {
  const int n = group.size(), me = group.rank();
  const int next = (me + 1) % n, previous = (me + n - 1) % n;
  for (const auto count : counts_for(group.size())) {
    if (n == 1) continue;
    const Field first(group, DType::float32, inputs(me, count), false),
        second(group, DType::int64, inputs(me, 3), false);
    const Field a(group, DType::float32, Values(count), false), b(group, DType::int64, Values(3), false);
    group.run({Call::send(first.buffer(), next), Call::send(second.buffer(), next), Call::recv(a.buffer(), previous),
               Call::recv(b.buffer(), previous)},
              soon());
    ASSERT_TRUE(a.holds(inputs(previous, count)) && b.holds(inputs(previous, 3)));
    if (me == 0) group.send(first.buffer(), next, soon());
    if (me == 1) group.recv(a.buffer(), 0, soon());
  }
}

inline void check_grouped_calls(const Group& group) {
  std::mt19937 generator(static_cast<unsigned>(group.rank()));
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> single, grouped;
  for (const std::size_t count : {1, 10, 3000, 100000, 400000}) {
    single.emplace_back(count);
    for (auto& value : single.back()) value = normal(generator);
  }
  grouped = single;
  std::vector<Call> calls;
  for (auto& values : grouped) calls.push_back(Call::all_reduce(buffer_of(std::span(values)), ReduceOp::mean));
  const auto work = group.start(calls, soon());
  for (auto& values : single) group.all_reduce(buffer_of(std::span(values)), ReduceOp::mean, soon());
  work.wait();
  for (std::size_t i = 0; i < single.size(); ++i) {
    auto of_first = single[i];
    group.broadcast(buffer_of(std::span(of_first)), 0, soon());
    ASSERT_EQ(0, std::memcmp(of_first.data(), single[i].data(), of_first.size() * sizeof(float)));
    for (std::size_t k = 0; k < single[i].size(); ++k) ASSERT_NEAR(single[i][k], grouped[i][k], 1e-5);
  }
}

inline void check_split(const Group& group) {
  const int color = group.rank() == 2 ? -1 : group.rank() % 2;
  const auto part = group.split(color, -group.rank(), soon());
  ASSERT_EQ(part == nullptr, group.rank() == 2);
  if (part) {
    std::vector<std::int64_t> ranks(static_cast<std::size_t>(part->size()));
    std::int64_t mine = group.rank();
    part->all_gather(buffer_of(std::span(&mine, 1)), buffer_of(std::span(ranks)), soon());
    std::vector<std::int64_t> expected;
    for (int r = group.size() - 1; r >= 0; --r) {
      if (r != 2 && r % 2 == color) expected.push_back(r);
    }
    ASSERT_EQ(ranks, expected);
  }
  group.barrier(soon());
}

inline void check_means_of_16_bits(const Group& group) {
  for (const std::size_t count : {3, 40'000}) {  // inside hosts by leaders, and in slices
    std::vector<kernels::Float16> values(count, kernels::Float16(60000.0f));
    group.all_reduce({values.data(), count, DType::float16}, ReduceOp::mean, soon());
    for (const auto& value : values) ASSERT_EQ(static_cast<float>(value), 60000.0f);
  }
}

}  // namespace lockstep::collective
