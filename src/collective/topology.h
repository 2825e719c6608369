// The processes that train together, and this one's place among them. Torch-free.
#pragma once

#include "lockstep/collective/communicator.h"

namespace lockstep {

// A value. The Communicators of all copies go on with the next generation of an elastic job, as all copies of a
// Communicator do.
struct Topology {
  // All processes train the same models on other examples.
  void train_with(const Communicator& ranks) { all = peers = data = tokens = gradients = same_part = ranks; }

  // Each process trains a model of its own by a strategy of its own, and its optimizer sums the gradients of `ranks`.
  // They divide the data too; a mesh divides the data by its own axes.
  void take_steps_with(const Communicator& ranks, bool with_own_data) {
    peers = ranks;
    if (!is_split) data = ranks;
    reads_own_data = with_own_data;
  }

  // The processes that train together; this process alone, unless something else is set. The others are some of them,
  // with this process, such as the processes along an axis of a mesh; but for what take_steps_with sets.
  Communicator all;
  Communicator peers;      // those that take the same steps
  Communicator data;       // those with other examples
  Communicator tokens;     // those with other examples, or other positions of one's sequences
  Communicator gradients;  // those whose gradients are summed after backward: other examples, and the same parameters
  Communicator meetings;   // those that train apart from this one, and bring their values together now and then
  Communicator same_part;  // one of each copy of a model: those with the same part of it
  Communicator positions;  // those with the same examples, and other positions of their sequences
  Communicator tensor;     // those that divide layers
  Communicator stages;     // those of a pipeline

  bool is_split = false;                   // models are split over the processes, which have one replica each
  int row_size = 1;                        // processes that have one copy of a model together
  int part = 0;                            // which part of it this process has, or is to have
  int last_stage = 0;                      // the rank in `stages` that has it
  bool computes_without_examples = false;  // replicas compute in every step, with examples or without

  int replicas = 1;          // of this process; each has other examples
  int replicas_in_step = 0;  // that compute a step together; 0: those of all processes

  bool reads_own_data = false;  // each of several peers reads other data, and has its own position in them
  bool came_later = false;      // to a job that runs
  bool may_be_chief = true;     // false where another process has that role

  int all_replicas() const { return replicas_in_step > 0 ? replicas_in_step : replicas * data.size(); }
  int first_replica() const { return replicas * data.rank(); }  // this process's, among all

  // This process came later, and has not joined the others yet.
  bool is_newcomer() const { return came_later && all.regroups() == 0; }

  // The chief decides: it alone writes logs and checkpoints.
  bool is_chief() const { return may_be_chief && !is_newcomer() && all.rank() == 0; }

  bool has_own_data() const { return reads_own_data && peers.size() > 1; }
  bool has_peers_with_own_models() const { return all.size() == 1 && peers.size() > 1; }

  // counts: true on one of the processes with one set of examples, always the same; its losses and outputs count.
  // counts_examples: true, among those, on one of each sequence.
  bool counts() const { return tensor.rank() == 0 && stages.rank() == last_stage; }
  bool counts_examples() const { return positions.rank() == 0; }
};

}  // namespace lockstep
