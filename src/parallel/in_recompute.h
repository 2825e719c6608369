// Tells modules that a forward is one of recompute.
#pragma once

namespace lockstep::parallel {

// True in this thread during the first forward of recompute, of which no graph is kept, and during the second one, in
// backward. Tensors that such a forward leaves in the module's members have no gradient.
bool in_recompute();

}  // namespace lockstep::parallel
