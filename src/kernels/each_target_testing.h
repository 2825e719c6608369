// For tests: runs a check with the kernels of each kind of processor that this one can stand for.
#pragma once

#include <gtest/gtest.h>
#include <hwy/targets.h>

namespace lockstep::kernels {

// The program's other threads must call no kernel meanwhile.
template <class Check>
void for_each_target(const Check& check) {
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    const testing::ScopedTrace trace(__FILE__, __LINE__, hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    check();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace lockstep::kernels
