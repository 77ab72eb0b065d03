// The form of a family's Hugging Face folder: its config.json, and what its
// tensors are called. A family's file in families/ fills one in.
// Errors: TS_CHECK_CONFIG, with file, key and value.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/detail/json.h"
#include "tessera/core/error.h"
#include "tessera/models/model_config.h"

namespace tessera::models::detail {

using tessera::detail::Json;

// Typed reads of one JSON object; a null counts as absent.
class Reader {
 public:
  Reader(const Json& object, std::string where)
      : object_(object), where_(std::move(where)) {}

  bool has(const char* key) const {
    return object_.contains(key) && !object_[key].is_null();
  }
  const Json& at(const char* key) const { return object_[key]; }
  std::string place(const char* key) const { return where_ + ": " + key; }

  int64_t size(const char* key) const {
    TS_CHECK_CONFIG(has(key), where_, ": \"", key, "\" is missing.");
    return size(key, 0);
  }
  int64_t size(const char* key, int64_t fallback) const {
    if (!has(key)) return fallback;
    const int64_t value = tessera::detail::as_int(object_[key], place(key));
    TS_CHECK_CONFIG(value > 0 && value <= kMaxSize, place(key), " is ", value,
                    "; it must be above 0 and at most ", kMaxSize, ".");
    return value;
  }
  // A size that may be 0.
  int64_t count(const char* key, int64_t fallback) const {
    return has(key) && object_[key] == 0 ? 0 : size(key, fallback);
  }
  bool is_null(const char* key) const {
    return object_.contains(key) && object_[key].is_null();
  }
  int64_t layers(const char* key) const {
    const int64_t value = size(key);
    TS_CHECK_CONFIG(value <= kMaxLayers, place(key), " is ", value,
                    "; it must be at most ", kMaxLayers, ".");
    return value;
  }
  double number(const char* key, double fallback) const {
    return has(key) ? tessera::detail::as_double(object_[key], place(key))
                    : fallback;
  }
  // Above `above`, and at most `most`.
  double number(const char* key, double fallback, double above,
                double most) const {
    const double value = number(key, fallback);
    TS_CHECK_CONFIG(value > above && value <= most, place(key), " is ", value,
                    "; it must be above ", above, " and at most ", most, ".");
    return value;
  }
  bool flag(const char* key, bool fallback) const {
    return has(key) ? tessera::detail::as_bool(object_[key], place(key))
                    : fallback;
  }
  std::string word(const char* key, const std::string& fallback) const {
    return has(key) ? tessera::detail::as_string(object_[key], place(key))
                    : fallback;
  }
  void refuse_unless(bool supported, const char* key) const {
    TS_CHECK_CONFIG(supported, place(key), " is ",
                    has(key) ? object_[key].dump() : "absent",
                    ", which is not supported.");
  }

 private:
  const Json& object_;
  std::string where_;
};

// A "*" stands for a number, first the layer's, then the expert's; ".weight"
// and ".bias" are kept, unless `ours` is all of a parameter's name.
struct TensorName {
  std::string_view ours;
  std::string_view theirs;
  bool transposed = false;
  // One of several parts of theirs along the output dim, which are so wide.
  size_t part = 0;
  std::vector<int64_t> (*widths)(const ModelConfig& model) = nullptr;
};
// Of q, k and v in one tensor.
std::vector<int64_t> qkv_widths(const ModelConfig& model);

struct HuggingFaceForm {
  std::span<const TensorName> (*names)();  // the first of a parameter counts
  const char* prefix;  // base models are also saved without it
  void (*read)(const Reader& in, ModelConfig& model);
  Json (*write)(const ModelConfig& model);
  // Keys that are model.dropout where they say the same, which the family has
  // then in the same places; none: it has fewer.
  std::span<const char* const> dropout = {};
  const char* aux_loss = "router_aux_loss_coef";  // its key, of experts
  // What each module of multi-token prediction has for itself, of whole
  // parameters of the model; and their number's key. None: there are none.
  std::span<const TensorName> copies = {};
  const char* ahead = nullptr;
};

// The form of Llama, which most others follow: its names, and the keys that
// they share. What a decoder has not is passed over.
std::span<const TensorName> llama_names();
// Those, but for parameters that `more` names, and some more.
std::vector<TensorName> with_llama_names(std::span<const TensorName> more);
inline constexpr int64_t kUsualWindow = 4096;  // where it is not said
struct LlamaKeys {
  bool attention_bias = true;  // the key has a meaning
  bool window_switch = true;   // use_sliding_window: else a window is not used
  int64_t default_window = 0;  // where sliding_window is not said; 0: none
  int64_t window_pattern = 0;  // as that of sliding_window_pattern; 0: no key
  double default_theta = 10000;
  // Where the key is not there; 0, and where it is null: of `heads`.
  int64_t default_kv_heads = 0, default_head_dim = 0;
};
void read_llama(const Reader& in, ModelConfig& model, const LlamaKeys& keys);
Json llama_json(const ModelConfig& model);
// The window of all layers: a number, or null.
Json window_json(const ModelConfig& model);
// Parts of it: sizes; layers with windows; rotary positions, by the keys of an
// object.
void read_llama_sizes(const Reader& in, ModelConfig& model,
                      const LlamaKeys& keys);
void read_windows(const Reader& in, const LlamaKeys& keys, ModelConfig& model);
// Kinds of layers, and that of each.
inline constexpr const char *kFull = "full_attention",
                            *kSliding = "sliding_attention";
Json layer_types_json(const ModelConfig& model);
void read_rotary(const Reader& in, const Reader& rope, ModelConfig& model);
inline const char* rope_type_key(const Reader& rope) {
  return rope.has("rope_type") ? "rope_type" : "type";
}
Json rotary_json(const ModelConfig& model);

// Of experts, whose number is in `experts`; where it is not said, a token goes
// to `top_k`.
void read_experts(const Reader& in, const char* experts, int64_t top_k,
                  ModelConfig& model);
// What the folders of a family can say of experts; the rest is Mixtral's.
struct ExpertKeys {
  bool layers = false;     // every, first_dense
  bool ffn = false;        // another width than a dense layer's
  bool normalize = false;  // that weights are not
  bool deepseeks = false;  // scale, groups, shared experts
  bool score_bias = false;
  const char* score = "softmax";
};
// TS_CHECK_CONFIG that such a folder can say all that the model has.
void require_said(const ModelConfig& model, const ExpertKeys& keys);

}  // namespace tessera::models::detail
