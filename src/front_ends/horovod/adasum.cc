#include "front_ends/horovod/adasum.h"

#include <ATen/ATen.h>

#include <bit>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "lockstep/gradient/tensor_collectives.h"

namespace lockstep::horovod {
namespace {

at::Tensor combined(const at::Tensor& a, const at::Tensor& b) {
  const auto x = a.to(at::kDouble), y = b.to(at::kDouble);
  const double both = at::dot(x, y).item<double>(), of_x = at::dot(x, x).item<double>(),
               of_y = at::dot(y, y).item<double>();
  const auto share = [&](double squares) { return squares == 0 ? 1 : 1 - both / (2 * squares); };
  return (x * share(of_x) + y * share(of_y)).to(a.scalar_type());
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
    session.carry_out({Call::send(buffer_of(tensor), partner), Call::recv(buffer_of(theirs), partner)});
    const bool is_first = session.rank() < partner;
    at::Tensor mine = tensor;
    mine.copy_(is_first ? combined(tensor, theirs) : combined(theirs, tensor));
  }
}

}  // namespace lockstep::horovod
