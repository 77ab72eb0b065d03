#include "tessera/data/fingerprint.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <set>

#include "tessera/core/error.h"
#include "tessera/core/hash.h"

namespace tessera::data {
namespace {

std::string describe(const FileFingerprint& file) {
  return c10::str(file.path, " (", file.bytes, " bytes, xxh3 ",
                  to_hex(file.xxh3), ")");
}

void append(std::string& text, const void* data, size_t size) {
  text.append(static_cast<const char*>(data), size);
}

template <typename T>
T take(std::string_view& text) {
  T value{};
  TORCH_INTERNAL_ASSERT(text.size() >= sizeof(T));
  const char* begin = text.data();
  std::memcpy(&value, begin, sizeof(T));
  text.remove_prefix(sizeof(T));
  return value;
}

std::string pack(const std::vector<FileFingerprint>& files) {
  std::string text;
  for (const FileFingerprint& file : files) {
    const uint64_t length = file.path.size();
    append(text, &length, sizeof(length));
    text += file.path;
    append(text, &file.bytes, sizeof(file.bytes));
    append(text, &file.xxh3, sizeof(file.xxh3));
  }
  return text;
}

std::vector<FileFingerprint> unpack(std::string_view text) {
  std::vector<FileFingerprint> files;
  while (!text.empty()) {
    FileFingerprint file;
    const auto length = take<uint64_t>(text);
    file.path = text.substr(0, length);
    text.remove_prefix(length);
    file.bytes = take<int64_t>(text);
    file.xxh3 = take<uint64_t>(text);
    files.push_back(std::move(file));
  }
  return files;
}

// Of what difference() looks at.
int64_t digest(const std::vector<FileFingerprint>& files) {
  std::string text;
  for (const FileFingerprint& file : files) {
    append(text, &file.bytes, sizeof(file.bytes));
    append(text, &file.xxh3, sizeof(file.xxh3));
  }
  return static_cast<int64_t>(hash64(text));
}

// So many numbers of each rank, in rank order.
template <size_t N>
std::vector<std::array<int64_t, N>> gather(
    comm::Group& group, const std::array<int64_t, N>& numbers) {
  std::vector<std::array<int64_t, N>> found(group.size());
  const at::Tensor mine = at::tensor(numbers, at::kLong);
  const at::Tensor all =
      at::zeros({group.size() * static_cast<int64_t>(N)}, at::kLong);
  group.all_gather(all, mine).synchronize();
  std::memcpy(found.data(), all.const_data_ptr(), all.nbytes());
  return found;
}

std::vector<std::vector<FileFingerprint>> gather(
    comm::Group& group, const std::vector<FileFingerprint>& files) {
  const std::string own = pack(files);
  std::vector<int64_t> sizes;
  for (const auto& [size] :
       gather<1>(group, {static_cast<int64_t>(own.size())})) {
    sizes.push_back(size);
  }
  const int64_t largest = *std::max_element(sizes.begin(), sizes.end());
  at::Tensor input = at::zeros({largest}, at::kByte);
  if (!own.empty()) {
    std::memcpy(input.data_ptr<uint8_t>(), own.data(), own.size());
  }
  at::Tensor all = at::zeros({group.size() * largest}, at::kByte);
  group.all_gather(all, input).synchronize();
  std::vector<std::vector<FileFingerprint>> lists;
  for (int64_t rank = 0; rank < group.size(); ++rank) {
    const auto* begin =
        reinterpret_cast<const char*>(all.data_ptr<uint8_t>()) + rank * largest;
    lists.push_back(unpack({begin, static_cast<size_t>(sizes[rank])}));
  }
  return lists;
}

void compare(comm::Group& group, const std::vector<FileFingerprint>& files,
             bool reads, const std::string& way_out) {
  if (group.size() == 1) return;
  const auto all = gather<2>(group, {reads ? 1 : 0, digest(files)});
  std::vector<size_t> readers;
  std::set<int64_t> digests;
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i][0] == 0) continue;
    readers.push_back(i);
    digests.insert(all[i][1]);
  }
  if (digests.size() < 2) return;
  std::vector<std::vector<FileFingerprint>> lists;
  std::vector<int64_t> ranks;
  const auto of_all = gather(group, files);
  for (const size_t i : readers) {
    lists.push_back(of_all[i]);
    ranks.push_back(group.ranks()[i]);
  }
  const std::string complaint = difference(lists, ranks);
  TS_CHECK_IO(complaint.empty(), complaint, " ", way_out);
}

}  // namespace

FileFingerprint fingerprint_of(const MappedFile& file) {
  return {file.path(), static_cast<int64_t>(file.size()), hash64(file.bytes())};
}

FileFingerprint fingerprint_of(const std::string& name,
                               const std::string& content) {
  return {name, static_cast<int64_t>(content.size()), hash64(content)};
}

std::string difference(const std::vector<std::vector<FileFingerprint>>& lists,
                       const std::vector<int64_t>& ranks) {
  const std::vector<FileFingerprint>& first = lists.at(0);
  for (size_t i = 1; i < lists.size(); ++i) {
    const std::vector<FileFingerprint>& other = lists[i];
    for (size_t k = 0; k < std::min(first.size(), other.size()); ++k) {
      if (first[k].bytes == other[k].bytes && first[k].xxh3 == other[k].xxh3) {
        continue;
      }
      return c10::str("ranks read different data: file ", k, " is ",
                      describe(first[k]), " on rank ", ranks[0], " and ",
                      describe(other[k]), " on rank ", ranks[i], ".");
    }
    if (first.size() != other.size()) {
      const auto& more = first.size() > other.size() ? first : other;
      return c10::str("ranks read different data: rank ", ranks[0], " has ",
                      first.size(), " files and rank ", ranks[i], " has ",
                      other.size(), "; the first that only one has is ",
                      describe(more[std::min(first.size(), other.size())]),
                      ".");
    }
  }
  return "";
}

void compare_across(comm::Group& group,
                    const std::vector<FileFingerprint>& files,
                    bool reads /* = true */) {
  compare(group, files, reads, "Give every host the same files.");
}

void compare_caches_across(comm::Group& group,
                           const std::vector<FileFingerprint>& caches,
                           bool reads /* = true */) {
  compare(group, caches, reads,
          "They are caches of the same text, tokenized on two days where the "
          "chat template writes the date (strftime_now), or by two versions of "
          "Tessera. Remove them on every host, or have all hosts use one "
          "folder (run.dir; of eval --cache).");
}

}  // namespace tessera::data
