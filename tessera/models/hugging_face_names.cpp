#include "tessera/models/hugging_face_names.h"

#include <ATen/ATen.h>

#include <cctype>
#include <numeric>
#include <sstream>
#include <string_view>

#include "tessera/core/error.h"
#include "tessera/models/detail/hugging_face_form.h"
#include "tessera/models/family.h"

namespace tessera::models {
namespace {

std::string with_numbers(std::string_view pattern,
                         const std::vector<std::string>& numbers) {
  std::string name;
  size_t next = 0;
  for (char letter : pattern) {
    if (letter != '*') {
      name += letter;
    } else if (next < numbers.size()) {
      name += numbers[next++];
    }
  }
  return name;
}

// Those between dots.
std::vector<std::string> numbers_in(const std::string& name) {
  std::vector<std::string> numbers;
  std::istringstream parts(name);
  for (std::string part; std::getline(parts, part, '.');) {
    if (std::isdigit(static_cast<unsigned char>(part[0])) != 0) {
      numbers.push_back(part);
    }
  }
  return numbers;
}

}  // namespace

std::vector<int64_t> HuggingFaceSource::stored_shape(
    std::vector<int64_t> ours) const {
  if (!widths.empty()) {
    ours[0] = std::accumulate(widths.begin(), widths.end(), int64_t{0});
  }
  if (transposed && ours.size() == 2) std::swap(ours[0], ours[1]);
  return ours;
}

mesh::Box HuggingFaceSource::stored_box(mesh::Box box) const {
  const auto first = widths.begin();
  box.offset[0] += std::accumulate(
      first, first + static_cast<std::ptrdiff_t>(part), int64_t{0});
  if (transposed && box.size.size() == 2) {
    std::swap(box.offset[0], box.offset[1]);
    std::swap(box.size[0], box.size[1]);
  }
  return box;
}

at::Tensor HuggingFaceSource::turned(const at::Tensor& values) const {
  return transposed && values.dim() == 2 ? values.t() : values;
}

std::optional<HuggingFaceSource> find_hugging_face_source(
    const ModelConfig& model, const std::string& parameter) {
  const size_t dot = parameter.rfind('.');
  const std::string block = parameter.substr(0, dot);
  const auto numbers = numbers_in(block);
  for (const auto& name : family_named(model.family).hugging_face->names()) {
    const std::string ours = with_numbers(name.ours, numbers);
    if (ours != block && ours != parameter) continue;
    const std::string kind = ours == block ? parameter.substr(dot) : "";
    HuggingFaceSource source{with_numbers(name.theirs, numbers) + kind,
                             name.transposed, name.part};
    if (name.widths != nullptr) source.widths = name.widths(model);
    return source;
  }
  return std::nullopt;
}

HuggingFaceSource hugging_face_source(const ModelConfig& model,
                                      const std::string& parameter) {
  auto source = find_hugging_face_source(model, parameter);
  TS_CHECK_CONFIG(source.has_value(), "a Hugging Face folder of model.family ",
                  model.family, " has no place for ", parameter,
                  ": leave out the key of model.moe that asks for it.");
  return *std::move(source);
}

std::vector<HuggingFaceCopy> hugging_face_copies(const ModelConfig& model) {
  std::vector<HuggingFaceCopy> copies;
  const auto& form = *family_named(model.family).hugging_face;
  for (int64_t block = model.layers; block < model.num_blocks(); ++block) {
    for (const auto& copy : form.copies) {
      const bool is_tied = copy.ours == "head" && model.tie_embeddings;
      copies.push_back(
          {with_numbers(copy.theirs, {std::to_string(block)}) + ".weight",
           std::string(is_tied ? "embed.tokens" : copy.ours) + ".weight"});
    }
  }
  return copies;
}

bool is_of_module_left_out(const ModelConfig& model,
                           const std::string& tensor) {
  if (model.mtp.layers > 0 || !family_named(model.family).predicts_ahead) {
    return false;
  }
  const auto numbers = numbers_in(tensor);
  if (numbers.empty() || numbers[0].size() > 9) return false;
  for (const std::string prefix : {"layers.", "model.layers."}) {
    if (tensor.starts_with(prefix + numbers[0] + ".")) {
      return std::stoll(numbers[0]) >= model.layers;
    }
  }
  return false;
}

std::string hugging_face_prefix(const std::string& family) {
  return family_named(family).hugging_face->prefix;
}

bool is_hugging_face_buffer(const std::string& tensor) {
  for (const std::string_view end :
       {".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"}) {
    if (tensor.ends_with(end)) return true;
  }
  return false;
}

}  // namespace tessera::models
