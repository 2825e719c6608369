// Initial values of the rows of a ShardedEmbedding.
#pragma once

namespace lockstep {

// A function of the table's seed and the row's number, whenever and wherever the row is made. A plain value.
struct RowInitializer {
  enum class Kind { uniform, normal, constant };

  // Made by name, as keras.initializers: "uniform" (-0.05 to 0.05), "normal" (deviation 0.05), "zeros", "ones". Throws
  // InvalidArgument for any other.
  RowInitializer(const char* name);  // NOLINT: Keras takes names

  // `scale` of uniform: values are from -scale to scale; of normal: the standard deviation; of constant: the value.
  // Throws InvalidArgument for one that is not finite, and, but for a constant, where it is not positive.
  RowInitializer(Kind kind, double scale);

  Kind kind = Kind::uniform;
  double scale = 0.05;
};

}  // namespace lockstep
