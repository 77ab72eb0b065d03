#include "tessera/models/family.h"

#include <array>

#include "tessera/core/error.h"
#include "tessera/core/units.h"

namespace tessera::models {

// Each in its file in families/.
extern const Family kGpt2, kLlama, kMistral, kQwen2, kQwen3, kMixtral, kOlmo2,
    kQwen3Moe, kDeepseekV3, kGemma3, kPhi3;

namespace {

constexpr std::array kFamilies = {
    &kGpt2,  &kLlama,    &kMistral,    &kQwen2,  &kQwen3, &kMixtral,
    &kOlmo2, &kQwen3Moe, &kDeepseekV3, &kGemma3, &kPhi3};

template <typename Condition>
std::string families_where(Condition condition) {
  std::vector<std::string> names;
  for (const Family* family : kFamilies) {
    if (condition(*family)) names.emplace_back(family->name);
  }
  return some_of(names, kFamilies.size());
}

}  // namespace

const Family* find_family(const std::string& name) {
  for (const Family* family : kFamilies) {
    if (name == family->name) return family;
  }
  return nullptr;
}

const Family& family_named(const std::string& name) {
  const Family* family = find_family(name);
  TS_CHECK_CONFIG(family != nullptr, "model.family: \"", name,
                  "\" is not built. Known: ",
                  some_of(names_of_families(), kFamilies.size()), ".");
  return *family;
}

std::vector<std::string> names_of_families() {
  std::vector<std::string> names;
  for (const Family* family : kFamilies) names.emplace_back(family->name);
  return names;
}

std::string families_with_experts() { return families_with(&Family::experts); }

std::string families_with_windows() {
  return families_where(
      [](const Family& family) { return family.windows != Windows::kNone; });
}

std::string families_with(bool Family::* fact) {
  return families_where([&](const Family& family) { return family.*fact; });
}

}  // namespace tessera::models
