// A Group's operations on tensors. Collective: every rank calls the same, with tensors of one dtype, and of one shape
// where nothing else is said. They throw what a Group throws, and InvalidArgument for undefined and sparse tensors and
// for complex and quantized dtypes. Outside of autograd.
//
// A Deadline is a moment: make one for each call, or for those that are to end by it together.
//
// A contiguous tensor on a CPU or a GPU is sent and written in place; any other is copied first. On a GPU an operation
// is enqueued on the device's current stream (group.h): it fails after it returned, as Group::check and
// Group::synchronize tell.
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/collective/communicator.h"
#include "lockstep/ops/tensor.h"

namespace lockstep {

// The memory of a contiguous tensor on a CPU or a CUDA device, which keeps it, for a Group's own operations. Throws
// InvalidArgument for any other.
Buffer buffer_of(const Tensor& tensor);

// The call of buffers of a tensor's device, in the order of the device's current stream in this thread.
Call on_stream_of(const Tensor& tensor, Call call);

// tensor <- op over all ranks' tensors, elementwise.
void all_reduce(const Group& group, const Tensor& tensor, ReduceOp op, Deadline deadline);

// tensor <- rank `root`'s.
void broadcast(const Group& group, const Tensor& tensor, int root, Deadline deadline);

// Each tensor <- rank `root`'s; of any dtypes, also complex ones. Ranks may have their values on different devices, and
// one may have them on several: then values go through host memory. Throws what the Communicator throws.
void broadcast(const Communicator& ranks, const std::vector<Tensor>& tensors, int root = 0);

// As above, for ranks that have agreed on the devices. Values go from device `by` of a rank to those of the others: a
// GPU of each rank, or the CPU on all ranks.
void broadcast(const Communicator& ranks, const std::vector<Tensor>& tensors, int root, at::Device by);

// The ranks' tensors one after the other along `dim`, where their sizes may differ, on this tensor's device. Not for
// scalars.
Tensor all_gather(const Group& group, const Tensor& tensor, Deadline deadline, std::int64_t dim = 0);

// This rank's rows of op over all ranks' tensors: [rows / size, ...]. Throws InvalidArgument where rows cannot be
// divided among the ranks.
Tensor reduce_scatter(const Group& group, const Tensor& tensor, ReduceOp op, Deadline deadline);

// Rows for ranks 0, 1, ... from each rank: the rows for this one, in the order of ranks: [rows, ...]. Throws as
// reduce_scatter.
Tensor all_to_all(const Group& group, const Tensor& tensor, Deadline deadline);

// Sends a tensor to a rank, or receives one from it in this tensor's shape and dtype. Not collective.
void send(const Group& group, const Tensor& tensor, int to, Deadline deadline);
void recv(const Group& group, const Tensor& tensor, int from, Deadline deadline);

}  // namespace lockstep
