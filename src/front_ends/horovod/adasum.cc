#include "front_ends/horovod/adasum.h"

#include <ATen/ATen.h>

#include <bit>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/gradient/tensor_collectives.h"

namespace lockstep::horovod {
namespace {

// The factors of a and of b: [2].
at::Tensor shares_of(const at::Tensor& a, const at::Tensor& b) {
  const auto x = a.to(at::kDouble), y = b.to(at::kDouble);
  const auto both = at::dot(x, y);
  const auto share = [&](const at::Tensor& one) {
    const auto squares = at::dot(one, one);
    return at::where(squares == 0, at::ones_like(squares), 1 - both / (2 * squares));
  };
  return at::stack({share(x), share(y)});
}

}  // namespace

void check_adasum(const std::string& caller, const at::Tensor& tensor, int ranks) {
  if (!tensor.is_floating_point()) {
    throw InvalidArgument(text(caller, ": Adasum is for floating-point tensors; this one is ", tensor.scalar_type()));
  }
  if (!std::has_single_bit(static_cast<unsigned>(ranks)))
    throw InvalidArgument(
        text(caller, ": Adasum combines pairs of ranks: their number, ", ranks, ", must be a power of two"));
}

void adasum(const Session& session, const at::Tensor& tensor) {
  auto theirs = at::empty_like(tensor);
  for (int distance = 1; distance < session.size(); distance *= 2) {
    const int partner = session.rank() ^ distance;
    session.carry_out({on_stream_of(tensor, Call::send(buffer_of(tensor), partner)),
                       on_stream_of(theirs, Call::recv(buffer_of(theirs), partner))});
    const bool is_first = session.rank() < partner;
    at::Tensor mine = tensor;
    const auto &a = is_first ? mine : theirs, &b = is_first ? theirs : mine;
    // Those of one rank, since sums may have other bits on another processor.
    const auto shares = is_first ? shares_of(a, b) : at::empty({2}, tensor.options().dtype(at::kDouble));
    const auto numbers = buffer_of(shares);
    session.carry_out(on_stream_of(shares, is_first ? Call::send(numbers, partner) : Call::recv(numbers, partner)));
    mine.copy_(a.to(at::kDouble) * shares[0] + b.to(at::kDouble) * shares[1]);
  }
}

}  // namespace lockstep::horovod
