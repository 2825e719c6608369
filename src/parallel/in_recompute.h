// Whether a forward is one of recompute.
#pragma once

namespace lockstep::parallel {

// In this thread, during the first forward of recompute, of which no graph is kept, and during the second one, in
// backward. What such a forward leaves in the module's members has no gradient.
bool in_recompute();

}  // namespace lockstep::parallel
