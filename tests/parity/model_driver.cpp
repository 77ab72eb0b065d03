// What tests/parity/test_models.py runs: a decoder of a Hugging Face folder,
// with token ids and results in safetensors files.
//
//   model_driver logits FOLDER IDS OUT DTYPE     OUT: logits (B, T, V)
//   model_driver export FOLDER OUT DTYPE         OUT: a folder
//   model_driver train FOLDER IDS OUT DTYPE LR   IDS: (steps, B, T + 1); prints
//                                                loss and norm of each step
//   model_driver dropped FOLDER IDS OUT SEED STEP FIRST
//                                                IDS: (B, T + 1); OUT: logits
//                                                of a step in fp64 and, of its
//                                                loss's sum, the gradient of
//                                                the learned positions;
//                                                prints the masks' keys
//   model_driver filter IN OUT TEMPERATURE TOP_K TOP_P MIN_P PENALTY
//                                                IN: logits (V), ids of a
//                                                text; OUT: scores (V)
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <cstdio>

#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/error.h"
#include "tessera/models/sampling.h"
#include "tessera/optim/gradient_norm.h"
#include "tessera/optim/optimizer.h"

namespace {

using namespace tessera;

constexpr double kClipNorm = 1.0;
constexpr double kEps = 1e-5;  // of AdamW

at::ScalarType dtype_of(const std::string& word) {
  return checkpoint::dtype_named(word).value();
}

at::Tensor ids_of(const std::string& path) {
  return checkpoint::SafetensorsFile(path).tensor("ids").clone();
}

void write_logits(const std::vector<std::string>& args) {
  const at::NoGradGuard no_grad;
  auto decoder =
      checkpoint::model_from_hugging_face(args[1], dtype_of(args[4]));
  const at::Tensor logits = decoder->forward(ids_of(args[2]));
  checkpoint::write_safetensors(
      args[3], {{"logits", logits.scalar_type(), logits.sizes().vec()}}, {},
      [&](const std::string&) { return logits; });
}

void write_dropped(const std::vector<std::string>& args) {
  auto decoder = checkpoint::model_from_hugging_face(args[1], at::kDouble);
  const at::Tensor ids = ids_of(args[2]);
  const int64_t tokens = ids.size(1) - 1;
  const models::Tokens places{
      tokens,
      {},
      nn::Draw{std::stoull(args[4]), std::stoll(args[5]), std::stoll(args[6])}};
  at::Tensor x = ids.narrow(1, 0, tokens);
  for (int64_t unit = 0; unit < decoder->num_units(); ++unit) {
    x = decoder->forward_unit(unit, x, places);
  }
  const at::Tensor logits = decoder->logits_of(x).detach();
  torch::autograd::backward(
      {decoder->loss_of(x, ids.narrow(1, 1, tokens)).sum});
  std::vector<std::string> names = {"embed"};
  for (int64_t i = 0; i < decoder->num_blocks(); ++i) {
    for (const char* part : {".attention.weights", ".attention", ".mlp"}) {
      names.push_back("blocks." + std::to_string(i) + part);
    }
  }
  for (const auto& name : names) {
    const auto key = nn::dropout_named(name, 1, *places.draw).key;
    std::printf("%u %u\n", key[0], key[1]);
  }
  at::Tensor gradient;
  for (const auto& parameter : nn::parameters_of(*decoder)) {
    if (parameter.name == "embed.positions.weight") {
      gradient = parameter.tensor.grad();
    }
  }
  checkpoint::write_safetensors(
      args[3],
      {{"logits", at::kDouble, logits.sizes().vec()},
       {"gradient", at::kDouble, gradient.sizes().vec()}},
      {}, [&](const std::string& name) {
        return name == "logits" ? logits : gradient;
      });
}

void write_folder(const std::vector<std::string>& args) {
  auto config = models::read_hugging_face_config(args[1]);
  config.dtype = dtype_of(args[3]);
  auto decoder = checkpoint::model_from_hugging_face(args[1], config.dtype);
  checkpoint::save_hugging_face(args[2], config,
                                checkpoint::parameters_of(*decoder));
}

// All but biases that balance experts, which transformers does not move.
std::vector<nn::Parameter> trained_of(models::Model& decoder) {
  auto parameters = nn::parameters_of(decoder);
  std::erase_if(parameters, [](const nn::Parameter& each) {
    return each.spec->balances_load;
  });
  return parameters;
}

std::vector<optim::FlatSegment> segments_of(models::Model& decoder) {
  std::vector<optim::FlatSegment> segments;
  for (const auto& parameter : trained_of(decoder)) {
    segments.push_back({.name = parameter.name,
                        .parameter = parameter.tensor,
                        .gradient = {},
                        .decay = parameter.tensor.dim() >= 2});
  }
  return segments;
}

// Clips to kClipNorm and returns the norm before.
double clip(models::Model& decoder) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : trained_of(decoder)) {
    gradients.push_back(parameter.tensor.grad());
  }
  const double norm =
      std::sqrt(optim::sum_of_squares(gradients).item<double>());
  optim::scale_gradients(gradients, optim::clip_scale(norm, kClipNorm));
  return norm;
}

void train(const std::vector<std::string>& args) {
  auto config = models::read_hugging_face_config(args[1]);
  auto decoder =
      checkpoint::model_from_hugging_face(args[1], dtype_of(args[4]));
  const auto optimizer =
      optim::make_optimizer({.eps = kEps}, segments_of(*decoder));
  const at::Tensor ids = ids_of(args[2]);
  const int64_t tokens = ids.size(2) - 1;
  for (int64_t step = 0; step < ids.size(0); ++step) {
    decoder->zero_grad();
    const auto loss = decoder->loss(ids[step].narrow(1, 0, tokens),
                                    ids[step].narrow(1, 1, tokens));
    const at::Tensor mean = loss.sum / loss.weight;
    torch::autograd::backward({mean});
    const double norm = clip(*decoder);
    optimizer->step(std::stod(args[5]));
    std::printf("%.17g %.17g\n", mean.item<double>(), norm);
  }
  config.dtype = dtype_of(args[4]);
  checkpoint::save_hugging_face(args[3], config,
                                checkpoint::parameters_of(*decoder));
}

void filter(const std::vector<std::string>& args) {
  const checkpoint::SafetensorsFile in(args[1]);
  const at::Tensor ids = in.tensor("ids").contiguous();
  const int64_t* first = ids.const_data_ptr<int64_t>();
  const at::Tensor scores =
      models::sampling_scores(in.tensor("logits"), {first, first + ids.numel()},
                              {.temperature = std::stod(args[3]),
                               .top_k = std::stoll(args[4]),
                               .top_p = std::stod(args[5]),
                               .min_p = std::stod(args[6]),
                               .repetition_penalty = std::stod(args[7])});
  checkpoint::write_safetensors(
      args[2], {{"scores", scores.scalar_type(), scores.sizes().vec()}}, {},
      [&](const std::string&) { return scores; });
}

int run(const std::vector<std::string>& args) {
  const std::string verb = args.empty() ? "" : args[0];
  if (verb == "logits" && args.size() == 5) {
    write_logits(args);
  } else if (verb == "dropped" && args.size() == 7) {
    write_dropped(args);
  } else if (verb == "export" && args.size() == 4) {
    write_folder(args);
  } else if (verb == "train" && args.size() == 6) {
    train(args);
  } else if (verb == "filter" && args.size() == 8) {
    filter(args);
  } else {
    std::fprintf(stderr, "usage: see the top of model_driver.cpp\n");
    return 2;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  try {
    return run({argv + 1, argv + argc});
  } catch (const tessera::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return static_cast<int>(error.exit_code());
  }
}
