// The precompiled header of sources that have to do with torch::nn::Module.
#pragma once
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>

#include "pch.h"
