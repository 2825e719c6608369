// The purpose of what backward exchanges for something that was exchanged in forward.
#pragma once

#include "lockstep/collective/purpose.h"

namespace lockstep::collective {

// Another number, whose words are those of `forward` after "the backward of"; nothing is named in a step.
Purpose backward_of(Purpose forward);

}  // namespace lockstep::collective
