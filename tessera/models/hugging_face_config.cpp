#include "tessera/models/hugging_face_config.h"

#include <algorithm>
#include <set>
#include <string_view>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/log.h"
#include "tessera/core/units.h"
#include "tessera/models/detail/hugging_face_form.h"
#include "tessera/models/family.h"

namespace tessera::models {
namespace {

using detail::Json;
using detail::Reader;

constexpr size_t kNamedAtMost = 100;               // families
constexpr uint64_t kMaxBytes = uint64_t{1} << 20;  // of a config.json

at::ScalarType read_dtype(const Reader& in) {
  const char* key = in.has("dtype") ? "dtype" : "torch_dtype";
  const std::string name = in.word(key, "float32");
  if (name == "float32") return at::kFloat;
  if (name == "bfloat16") return at::kBFloat16;
  if (name == "float16") return at::kHalf;
  if (name == "float64") return at::kDouble;
  TS_CHECK_CONFIG(false, in.place(key), " is \"", name,
                  "\"; known: float64, float32, bfloat16, float16.");
}

std::optional<std::vector<int64_t>> eos_tokens_in(const Reader& in) {
  constexpr const char* kKey = "eos_token_id";
  if (!in.has(kKey)) return std::nullopt;
  const Json& eos = in.at(kKey);
  std::vector<int64_t> tokens;
  for (const auto& id : eos.is_array() ? eos : Json::array({eos})) {
    tokens.push_back(tessera::detail::as_int(id, in.place(kKey)));
  }
  return tokens;
}

void read_tokens(const Reader& in, HuggingFaceConfig& config) {
  if (in.has("bos_token_id")) {
    config.bos_token = tessera::detail::as_int(in.at("bos_token_id"),
                                               in.place("bos_token_id"));
  }
  if (auto eos = eos_tokens_in(in)) config.eos_tokens = std::move(*eos);
}

// Families that many ask for, with what they have that no decoder here has.
void refuse_known(const Reader& in, const std::string& family) {
  TS_CHECK_CONFIG(
      family != "gpt_oss", in.place("model_type"),
      " is \"gpt_oss\", which is not built: its softmax has a sink beside the "
      "keys, its experts have biases and a gated activation of their own, and "
      "its folders hold MXFP4. A model with windows and experts that is built "
      "is \"mixtral\" or \"qwen3_moe\".");
}

// A rate of model.dropout that a folder does not say is that of transformers'
// GPT2Config, whose family alone has some.
double rate_of(const Reader& in, const Family& family, const char* key) {
  constexpr double kUnsaid = 0.1;
  const bool is_ours = std::ranges::count(family.hugging_face->dropout,
                                          std::string_view(key)) > 0;
  return in.number(key, is_ours ? kUnsaid : 0.0);
}

// What the family's rates are in model.dropout: 0 where they differ, and it
// cannot say them.
double read_dropout(const Reader& in, const Family& family) {
  std::set<double> rates;
  for (const char* key : family.hugging_face->dropout) {
    const double rate = rate_of(in, family, key);
    rates.insert(rate);
    TS_CHECK_CONFIG(rate >= 0 && rate <= kMostDropout, in.place(key), " is ",
                    rate, "; it must be at least 0 and at most ", kMostDropout,
                    ".");
  }
  return rates.size() == 1 ? *rates.begin() : 0.0;
}

// Of rates that model.dropout does not take over.
void warn_of_dropout(const Reader& in, const Family& family,
                     const ModelConfig& model) {
  for (const char* key :
       {"resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"}) {
    const double rate = rate_of(in, family, key);
    if (rate == 0.0 || model.dropout > 0) continue;
    log::warning(in.place(key), " is ", rate,
                 ", which is not taken over: model.dropout is one rate of "
                 "embeddings, attention and residuals, and 0 unless it is "
                 "set.");
  }
}

const char* dtype_word(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return "float64";
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    default:
      return "float32";
  }
}

constexpr const char* kPadding = "pad_token_id";

// Those that there are none of are null: left out, transformers would take
// numbers of its own for them.
void put_tokens(const HuggingFaceConfig& config, Json& json) {
  json["bos_token_id"] = config.bos_token ? Json(*config.bos_token) : Json();
  if (config.eos_tokens.size() == 1) {
    json["eos_token_id"] = config.eos_tokens[0];
  } else {
    json["eos_token_id"] =
        config.eos_tokens.empty() ? Json() : Json(config.eos_tokens);
  }
}

// Of another tokenizer than the one that `json` came with.
void put_other_tokens(const HuggingFaceConfig& config, Json& json) {
  put_tokens(config, json);
  if (json.contains(kPadding)) json[kPadding] = nullptr;
}

// How long sequences get, all that `now` says of it: a factor, or the length
// before, that went by max_position_embeddings would be another one. With it
// what positions are scaled by.
void put_length(const Json& now, Json& json) {
  constexpr const char* kBefore = "original_max_position_embeddings";
  json.erase("rope_scaling");
  json.erase(kBefore);
  for (const char* key : {"max_position_embeddings", kBefore, "rope_parameters",
                          "rope_scaling"}) {
    if (now.contains(key)) json[key] = now[key];
  }
  // By which transformers scales: a Mixtral that says none has none there.
  const bool says_head =
      json.contains("head_dim") && !json["head_dim"].is_null();
  if (!says_head && now.contains("head_dim")) {
    json["head_dim"] = now["head_dim"];
  }
}

// A text and what it says, for changes.
struct Said {
  Said(const std::string& text, const std::string& source)
      : json(tessera::detail::parse_json(text, source)), in(json, source) {
    TS_CHECK_CONFIG(json.is_object(), source, ": must be a JSON object.");
  }
  Json json;
  Reader in;
};

bool has_tokens_of(const Reader& in, const HuggingFaceConfig& config) {
  HuggingFaceConfig said;
  read_tokens(in, said);
  return said.bos_token == config.bos_token &&
         said.eos_tokens == config.eos_tokens;
}

}  // namespace

HuggingFaceConfig parse_hugging_face_config(const std::string& text,
                                            const std::string& source) {
  const Json json = tessera::detail::parse_json(text, source);
  TS_CHECK_CONFIG(json.is_object(), source, ": must be a JSON object.");
  const Reader in(json, source);
  TS_CHECK_CONFIG(in.has("model_type"), source, ": \"model_type\" is missing.");
  HuggingFaceConfig config;
  config.model.family = in.word("model_type", "");
  const Family* family = find_family(config.model.family);
  refuse_known(in, config.model.family);
  TS_CHECK_CONFIG(
      family != nullptr, in.place("model_type"), " is \"", config.model.family,
      "\". Supported: ", some_of(names_of_families(), kNamedAtMost), ".");
  in.refuse_unless(!in.has("quantization_config"), "quantization_config");
  config.model.vocab = in.size("vocab_size");
  family->hugging_face->read(in, config.model);
  config.model.complete();
  config.dtype = read_dtype(in);
  read_tokens(in, config);
  config.model.dropout = read_dropout(in, *family);
  warn_of_dropout(in, *family, config.model);
  return config;
}

HuggingFaceConfig read_hugging_face_config(const std::string& folder) {
  const std::string path = folder + "/config.json";
  return parse_hugging_face_config(read_file(path, kMaxBytes), path);
}

std::string hugging_face_config_json(const HuggingFaceConfig& config) {
  const Family& family = family_named(config.model.family);
  Json json = {{"architectures", Json::array({family.architecture})},
               {"model_type", family.name},
               {"vocab_size", config.model.vocab},
               {"tie_word_embeddings", config.model.tie_embeddings},
               {"use_cache", true},
               {"initializer_range", 0.02},
               {"torch_dtype", dtype_word(config.dtype)},
               {"dtype", dtype_word(config.dtype)}};
  json.update(family.hugging_face->write(config.model));
  put_tokens(config, json);
  return json.dump(2) + "\n";
}

std::string generation_config_json(const HuggingFaceConfig& config) {
  Json json = {{"_from_model_config", true}};
  put_tokens(config, json);
  return json.dump(2) + "\n";
}

bool has_tokens_of(const std::string& text, const std::string& source,
                   const HuggingFaceConfig& config) {
  return has_tokens_of(Said(text, source).in, config);
}

std::string updated_hugging_face_config(const std::string& text,
                                        const std::string& source,
                                        const HuggingFaceConfig& config,
                                        bool has_its_tokenizer) {
  Said said(text, source);
  const Json before = said.json;
  if (read_dtype(said.in) != config.dtype) {
    const bool has_old = said.in.has("torch_dtype");
    for (const char* key : {"dtype", "torch_dtype"}) {
      const bool is_old = std::string_view(key) == "torch_dtype";
      if (said.in.has(key) || (!is_old && !has_old)) {
        said.json[key] = dtype_word(config.dtype);
      }
    }
  }
  const Family& family = family_named(config.model.family);
  ModelConfig before_it;
  before_it.family = family.name;
  family.hugging_face->read(said.in, before_it);
  if (before_it.moe.aux_loss != config.model.moe.aux_loss && family.experts) {
    said.json[family.hugging_face->aux_loss] = config.model.moe.aux_loss;
  }
  if (before_it.mtp.layers != config.model.mtp.layers) {
    said.json[family.hugging_face->ahead] = config.model.mtp.layers;
  }
  if (before_it.rope_scaling != config.model.rope_scaling ||
      before_it.max_seq != config.model.max_seq) {
    put_length(family.hugging_face->write(config.model), said.json);
  }
  if (read_dropout(said.in, family) != config.model.dropout) {
    for (const char* key : family.hugging_face->dropout) {
      said.json[key] = config.model.dropout;
    }
  }
  if (!has_its_tokenizer) {
    const bool has_default =  // of transformers, which is a token
        family.hugging_face->write(config.model).contains(kPadding);
    if (has_default) said.json[kPadding] = nullptr;
    put_other_tokens(config, said.json);
  } else if (!has_tokens_of(said.in, config)) {
    put_tokens(config, said.json);
  }
  return said.json == before ? text : said.json.dump(2) + "\n";
}

std::optional<std::vector<int64_t>> eos_tokens_of(const std::string& text,
                                                  const std::string& source) {
  const Json json = tessera::detail::parse_json(text, source);
  if (!json.is_object()) return std::nullopt;
  return eos_tokens_in(Reader(json, source));
}

std::string updated_generation_config(const std::string& text,
                                      const std::string& source,
                                      const HuggingFaceConfig& config,
                                      bool has_its_tokenizer) {
  Said said(text, source);
  has_its_tokenizer ? put_tokens(config, said.json)
                    : put_other_tokens(config, said.json);
  return said.json.dump(2) + "\n";
}

}  // namespace tessera::models
