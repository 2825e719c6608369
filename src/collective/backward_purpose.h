// The purpose of an exchange in backward that belongs to an exchange in forward.
#pragma once

#include "lockstep/collective/purpose.h"

namespace lockstep::collective {

// The result has another number, and the words of `forward` after "the backward of". Nothing is named, so steps may
// call this.
Purpose backward_of(Purpose forward);

}  // namespace lockstep::collective
