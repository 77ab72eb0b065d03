// What torch::save() has written of a module, read into the memory that its
// parameters and buffers have. torch::load() gives them other memory, of which
// what wraps a module, or has cut it (parallelize()), knows nothing.
//
// Use:    tessera::load(*net, "net.pt"); under fully_shard() while what
//         gather() gives lives; of a module that parallelize() has cut, what
//         this rank saved of its own shares.
// Errors: TS_CHECK_IO for a file that cannot be read, lacks a tensor, or has
//         one of another shape: nothing is changed then.
// Threads: one a module.
#pragma once

#include <torch/nn/module.h>

#include <string>

namespace tessera {

void load(torch::nn::Module& module, const std::string& file);

}  // namespace tessera
