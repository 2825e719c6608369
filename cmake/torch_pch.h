// Precompiled once for every file that includes torch.
#pragma once

#include <torch/types.h>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>
