// What Python's str does, on UTF-8: code points, Unicode's white space and
// cases.
//
// REQUIRES: text is valid UTF-8.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data::jinja {

std::vector<uint32_t> code_points(std::string_view text);
std::string text_of(const std::vector<uint32_t>& points);
int64_t length_of(std::string_view text);  // in code points
bool is_space(uint32_t code_point);        // as str.isspace

enum class Side { kLeft, kRight, kBoth };
std::string strip(std::string_view text, Side side = Side::kBoth);
// Of any of the code points in `set`.
std::string strip(std::string_view text, std::string_view set, Side side);

std::string upper(std::string_view text);
std::string lower(std::string_view text);
std::string capitalize(std::string_view text);  // str.capitalize
std::string title(std::string_view text);       // str.title
// The filter title: words begin behind white space, "-", "(", "{", "[", "<".
std::string title_of_words(std::string_view text);
int64_t count_words(std::string_view text);  // runs of \w
bool is_digit(uint32_t code_point);          // as str.isdigit

// Where `wanted` is in `text`, first or last, or npos.
size_t find_text(std::string_view text, std::string_view wanted);
size_t find_last_text(std::string_view text, std::string_view wanted);

// By white space, or by `separator`; at most `limit` cuts, -1: all.
std::vector<std::string> split(std::string_view text, int64_t limit = -1);
std::vector<std::string> split(std::string_view text,
                               std::string_view separator, int64_t limit = -1);
std::vector<std::string> split_right(std::string_view text,
                                     std::string_view separator, int64_t limit);
std::vector<std::string> split_lines(std::string_view text);
std::string replace(std::string_view text, std::string_view from,
                    std::string_view to, int64_t limit = -1);

std::string hexadecimal(uint32_t value, int digits);
std::string repr_of_text(std::string_view text);  // repr()
std::string escape_html(std::string_view text);

}  // namespace tessera::data::jinja
