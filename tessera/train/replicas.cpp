#include "tessera/train/replicas.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <span>
#include <sstream>
#include <utility>
#include <vector>

#include "tessera/comm/agree.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/core/log.h"
#include "tessera/core/processor.h"
#include "tessera/core/units.h"
#include "tessera/core/vectors.h"

namespace tessera::train {

using checkpoint::TensorEntry;

namespace {

constexpr size_t kNamedAtMost = 8;                  // ranks
constexpr int64_t kWordsAtOnce = int64_t{1} << 22;  // on a device

// Which box of which tensor.
uint64_t key_of(const TensorEntry& entry) {
  return hash64(c10::str(entry.name, " ", c10::Join(",", entry.box.offset), " ",
                         c10::Join(",", entry.box.size)));
}

bool is_compared(const TensorEntry& entry) {
  return entry.holders > 1 && !entry.box.empty();
}

struct Held {
  int64_t rank = 0;
  uint64_t hash = 0;
};

struct Box {
  std::string name;
  std::vector<Held> held;  // by rank
};

// The ranks that are not with the most; where none are most, all.
std::vector<int64_t> outvoted(const std::vector<Held>& held) {
  std::map<uint64_t, std::vector<int64_t>> by_hash;
  for (const auto& [rank, hash] : held) by_hash[hash].push_back(rank);
  size_t most = 0;
  for (const auto& [hash, ranks] : by_hash) most = std::max(most, ranks.size());
  const auto has_most = [&](const auto& each) {
    return each.second.size() == most;
  };
  const bool is_tie = std::ranges::count_if(by_hash, has_most) > 1;
  std::vector<int64_t> out;
  for (const auto& each : by_hash) {
    if (is_tie || !has_most(each)) {
      out.insert(out.end(), each.second.begin(), each.second.end());
    }
  }
  std::ranges::sort(out);
  return out;
}

// A line a box that is compared.
std::string to_text(const checkpoint::State& state) {
  std::ostringstream text;
  for (const TensorEntry& entry : state.tensors) {
    if (!is_compared(entry)) continue;
    text << key_of(entry) << " " << hash_of_bytes(entry.local) << " "
         << entry.name << "\n";
  }
  return text.str();
}

std::map<uint64_t, Box> boxes_in(const std::vector<std::string>& texts) {
  std::map<uint64_t, Box> boxes;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    std::istringstream lines(texts[rank]);
    uint64_t key = 0;
    Held held{.rank = static_cast<int64_t>(rank)};
    std::string name;
    while (lines >> key >> held.hash >> name) {
      boxes[key].name = name;
      boxes[key].held.push_back(held);
    }
  }
  return boxes;
}

// On rank 0; the others have no texts.
std::string complaint_of(const std::vector<std::string>& texts,
                         const mesh::DeviceMesh& mesh) {
  std::map<std::string, std::vector<int64_t>> differing;  // by tensor
  for (const auto& [key, box] : boxes_in(texts)) {
    const std::vector<int64_t> out = outvoted(box.held);
    if (!out.empty()) differing.try_emplace(box.name, out);
  }
  if (differing.empty()) return "";
  const auto& [name, ranks] = *differing.begin();
  const size_t others = differing.size() - 1;
  return c10::str(
      named_ranks(ranks, mesh),
      ranks.size() == 1 ? " holds other bytes of '" : " differ in '", name, "'",
      others > 0 ? c10::str(" and ", others, " other tensors") : "",
      ranks.size() == 1 ? " than the other ranks that compute it as well"
                        : ", which each of them computes alike");
}

}  // namespace

std::string processor_of(at::Device device) {
  if (!device.is_cpu()) return c10::DeviceTypeName(device.type());
  return c10::str(processor_name(), " (", describe_vectors(), ")");
}

std::string computing_otherwise(comm::Group& world, const std::string& with) {
  const std::string of_rank_0 = comm::text_of_rank_0(world, with);
  return comm::first_complaint(
      world, with == of_rank_0
                 ? ""
                 : c10::str("rank ", world.rank(), " computes with ", with,
                            ", rank 0 with ", of_rank_0));
}

std::string named_ranks(const std::vector<int64_t>& ranks,
                        const mesh::DeviceMesh& mesh) {
  std::vector<std::string> names;
  for (const int64_t rank : ranks) {
    const std::string place = mesh.describe(rank);
    names.push_back(c10::str(rank, place.empty() ? "" : " (" + place + ")"));
  }
  return (ranks.size() == 1 ? "rank " : "ranks ") +
         some_of(names, kNamedAtMost);
}

uint64_t hash_of_bytes(const at::Tensor& tensor) {
  const at::Tensor all = tensor.detach().contiguous();
  if (all.nbytes() == 0) return 0;
  if (all.is_cpu()) {
    return hash64(std::span(static_cast<const std::byte*>(all.const_data_ptr()),
                            all.nbytes()));
  }
  // Words times odd numbers, added up where they are: one word that changes
  // always shows.
  at::Tensor bytes = all.view({-1}).view(at::kByte);
  bytes = at::constant_pad_nd(bytes, {0, (4 - bytes.numel() % 4) % 4});
  const at::Tensor words = bytes.view(at::kInt);
  uint64_t hash = 0;
  for (int64_t first = 0; first < words.numel(); first += kWordsAtOnce) {
    const int64_t count = std::min(kWordsAtOnce, words.numel() - first);
    const at::Tensor weights =
        at::arange(2 * first + 1, 2 * (first + count) + 1, 2,
                   words.options().dtype(at::kLong));
    hash += static_cast<uint64_t>(
        (words.narrow(0, first, count) * weights).sum().item<int64_t>());
  }
  return hash;
}

std::string differing_replicas(const checkpoint::State& state,
                               const mesh::DeviceMesh& mesh,
                               comm::Group& world) {
  if (world.size() == 1) return "";
  // Of a box with n holders the owner's hash counts n - 1 times, and that of
  // each other holder is taken off: what is left of all is 0 where they agree.
  uint64_t mine = 0;
  for (const TensorEntry& entry : state.tensors) {
    if (!is_compared(entry)) continue;
    const uint64_t hash =
        hash64(std::to_string(hash_of_bytes(entry.local)), key_of(entry));
    mine += entry.owned ? (entry.holders - 1) * hash : -hash;
  }
  constexpr uint64_t kLow = UINT32_MAX;
  at::Tensor halves = at::tensor(
      {static_cast<int64_t>(mine & kLow), static_cast<int64_t>(mine >> 32)},
      at::kLong);
  world.all_reduce(halves).synchronize();
  const auto* half = halves.const_data_ptr<int64_t>();
  const uint64_t left =
      static_cast<uint64_t>(half[0]) + (static_cast<uint64_t>(half[1]) << 32);
  if (left == 0) return "";
  const auto texts = comm::gather_texts(world, to_text(state));
  std::string complaint = complaint_of(texts, mesh);
  if (complaint.empty() && world.rank() == 0) {
    complaint =
        "ranks hold different bytes of what they compute alike, which "
        "a second look did not find again";
  }
  return comm::first_complaint(world, complaint);
}

ReplicaWatch::ReplicaWatch(int64_t every, comm::Group& world, at::Device device)
    : every_(world.size() > 1 ? every : 0), world_(world) {
  if (every_ == 0) return;
  const std::string other = computing_otherwise(world, processor_of(device));
  if (other.empty()) return;
  every_ = 0;
  if (world.rank() == 0) {
    log::info("monitor.replicas: nothing is compared, as ", other,
              ", and other processors round otherwise");
  }
}

bool ReplicaWatch::compare(int64_t step,
                           const std::function<checkpoint::State()>& take,
                           const mesh::DeviceMesh& mesh) {
  if (every_ == 0 || step == compared_) return false;
  const std::string complaint = differing_replicas(take(), mesh, world_);
  const std::string since = compared_ < 0
                                ? "Memory"
                                : c10::str("They were alike after step ",
                                           compared_, ": since then memory");
  TS_CHECK(complaint.empty(), "after step ", step, " ", complaint, ". ", since,
           " or a processor failed, or the program. No checkpoint was written "
           "of it; the same command goes on from the newest one. Where it "
           "happens again, leave that host out.");
  compared_ = step;
  return true;
}

}  // namespace tessera::train
