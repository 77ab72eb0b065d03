// An object of JSON as text, field by field, floats so that they read back to
// the same value. Infinities and NaN, which JSON has not, become null.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::monitor::detail {

// The shortest digits that read back to `value`; "null" where not finite.
std::string shortest(double value);

class JsonText {
 public:
  JsonText& number(const char* name, double value);
  JsonText& number(const char* name, int64_t value);
  JsonText& number(const char* name, const std::optional<double>& value);
  JsonText& numbers(const char* name, const std::vector<double>& values);
  JsonText& text(const char* name, const std::string& value);
  JsonText& object(const char* name, const JsonText& value);
  JsonText& objects(const char* name, const std::vector<JsonText>& values);
  std::string str() const { return "{" + fields_ + "}"; }

 private:
  JsonText& raw(const char* name, const std::string& value);
  std::string fields_;
};

}  // namespace tessera::monitor::detail
