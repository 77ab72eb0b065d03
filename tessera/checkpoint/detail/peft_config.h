// adapter_config.json of a PEFT folder.
//
// Errors: TS_CHECK_CONFIG by the key and its value.
#pragma once

#include <string>

#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/detail/json.h"

namespace tessera::checkpoint::detail {

using tessera::detail::Json;

inline constexpr const char* kPeftConfigFile = "/adapter_config.json";
inline constexpr const char* kPeftBase = "base_model_name_or_path";

Json peft_config(const std::string& folder);

// Null, false, "", [] and {} all say that there is none.
bool says_nothing(const Json& json, const char* key);

// Adapters of plain LoRA alone are taken. `path`: of the file, for words.
void refuse_other_kinds(const Json& json, const std::string& path);

// Ranks may differ by layer, but not what their products are scaled by.
// REQUIRES: "r" and "lora_alpha" are there.
void check_peft_patterns(const Json& json, const SafetensorsFile& file,
                         const std::string& path);

}  // namespace tessera::checkpoint::detail
