// Operators on a divided parameter that its layer's style does not know. They act on the parts where these give parts
// of what one process would compute. Else they act on the whole, which is gathered. Operators that can do neither are
// refused.
#pragma once

#include "ops/parameter_hook.h"
#include "parallel/divided_parameter.h"

namespace lockstep::parallel {

// How operators see a value of which each rank has a part.
enum class OtherOperators {
  on_whole,  // as one process does: the value is the whole one
  on_part,   // the module is written for parts; what reduces the divided dimension is of the whole
};

// Prepares the call's argument at `place`: the parameter, or a view or a copy of it. Returns whether it has carried out
// the operator. Collective where it gathers. Throws InvalidArgument for operators that it refuses.
bool run_other_operator(const DividedParameter& parameter, OtherOperators see, const ops::OperatorCall& call,
                        const ops::ArgumentPlace& place);

// True where the operator takes this tensor and no other but numbers, and is pointwise, a copy, or a sum or norm of all
// elements.
bool is_of_it_alone(const ops::OperatorCall& call, const ops::ArgumentPlace& place);

// Carries out an operator of it alone that is pointwise or a copy, and returns true: the result goes through hooks as
// the argument does. Returns false for other operators.
bool keeps_hooks(const ops::OperatorCall& call, const ops::ArgumentPlace& place);

// True where another operand is as large as this rank's part along the divided dimension, the last one of both.
bool is_part_of_outputs(const ops::OperatorCall& call, const Tensor& part);

}  // namespace lockstep::parallel
