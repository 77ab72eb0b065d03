#include "tessera/monitor/tensorboard.h"

#include <unistd.h>

#include <atomic>
#include <ctime>
#include <filesystem>
#include <span>

#include "tessera/core/crc32c.h"
#include "tessera/core/error.h"
#include "tessera/core/host.h"
#include "tessera/core/log.h"
#include "tessera/monitor/fields.h"
#include "tessera/monitor/links.h"

namespace tessera::monitor {
namespace {

// The wire format of protocol buffers, as far as scalars and texts need it.
class Message {
 public:
  Message& integer(int field, uint64_t value) {
    varint(field << 3);
    varint(value);
    return *this;
  }
  Message& fixed64(int field, double value) {
    return fixed(field << 3 | 1, &value, sizeof value);
  }
  Message& fixed32(int field, float value) {
    return fixed(field << 3 | 5, &value, sizeof value);
  }
  Message& bytes(int field, const std::string& value) {
    varint(field << 3 | 2);
    varint(value.size());
    text_ += value;
    return *this;
  }
  const std::string& str() const { return text_; }

 private:
  void varint(uint64_t value) {
    for (; value > 127; value >>= 7) text_ += static_cast<char>(value | 128);
    text_ += static_cast<char>(value);
  }
  Message& fixed(int key, const void* data, size_t size) {
    varint(key);
    text_.append(static_cast<const char*>(data), size);
    return *this;
  }
  std::string text_;
};

// The numbers of the fields in event.proto and summary.proto.
enum Event {
  kWallTime = 1,
  kStep = 2,
  kFileVersion = 3,
  kSummary = 5,
  kSessionLog = 7
};
enum SummaryField { kValue = 1 };
enum Value { kTag = 1, kSimpleValue = 2, kTensor = 8, kMetadata = 9 };
enum SummaryMetadata { kPluginData = 1 };
enum PluginData { kPluginName = 1 };
enum Tensor { kType = 1, kStringValue = 8 };
constexpr int kStringType = 7;  // of types.proto
enum SessionLog { kStatus = 1 };
constexpr int kStart = 1;

uint32_t masked_crc(const std::string& bytes) {
  const uint32_t crc = crc32c(std::as_bytes(std::span(bytes)));
  return (crc >> 15 | crc << 17) + 0xa282ead8U;
}

template <typename T>
std::string raw_bytes(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

double now_s() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<double>(now.tv_sec) +
         1e-9 * static_cast<double>(now.tv_nsec);
}

constexpr const char* kPrefix = "events.out.tfevents.";

// Of an earlier start.
bool has_events(const std::string& folder) {
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(folder, none)) {
    if (entry.path().filename().string().starts_with(kPrefix)) return true;
  }
  return false;
}

std::string file_name() {
  static std::atomic<int> count{0};
  return c10::str(kPrefix, static_cast<int64_t>(now_s()), ".", host_name(), ".",
                  getpid(), ".", count++);
}

// The values of one event.
class Values {
 public:
  void add(const std::string& tag, double value) {
    Message scalar;
    scalar.bytes(kTag, tag).fixed32(kSimpleValue, static_cast<float>(value));
    summary_.bytes(kValue, scalar.str());
  }
  void add_text(const std::string& tag, const std::string& text) {
    Message plugin, metadata, tensor, value;
    plugin.bytes(kPluginName, "text");
    metadata.bytes(kPluginData, plugin.str());
    tensor.integer(kType, kStringType).bytes(kStringValue, text);
    value.bytes(kTag, tag)
        .bytes(kTensor, tensor.str())
        .bytes(kMetadata, metadata.str());
    summary_.bytes(kValue, value.str());
  }
  const std::string& str() const { return summary_.str(); }

 private:
  Message summary_;
};

// TensorBoard shows Markdown, of which this is a piece of code: as it is.
std::string as_code(const std::string& text) {
  std::string code = "    ";
  for (const char letter : text) {
    code += letter;
    if (letter == '\n') code += "    ";
  }
  return code;
}

// Where ranks have few pairs each has tags of its own; else the slowest link of
// the round and its median one have.
void add_links(const std::vector<LinkSpeed>& links, int64_t world_size,
               Values& values) {
  const bool are_few =
      world_size * (world_size - 1) / 2 <= static_cast<int64_t>(kLinksShown);
  const auto shown = are_few ? links : slowest_and_median(links, /*most=*/1);
  for (size_t i = 0; i < shown.size(); ++i) {
    const LinkSpeed& link = shown[i];
    const std::string name = are_few  ? c10::str(link.from, "-", link.to)
                             : i == 0 ? "slowest"
                                      : "median";
    values.add("links/" + name + "/latency(us)", link.latency_us);
    values.add("links/" + name + "/bandwidth(GB/s)", link.gbps);
  }
}

Values values_of(const StepRecord& record, const RunInfo& info) {
  Values values;
  for (const Field& field : fields()) {
    const std::optional<double> value = field.value(record);
    if (field.tag && value) values.add(field.tag, field.tag_factor * *value);
  }
  values.add("throughput(tps)",
             record.tokens_per_s / static_cast<double>(info.world_size));
  if (info.host_memory_mib > 0) {
    values.add("memory/max_active(%)",
               100 * record.mem_peak_mib / info.host_memory_mib);
  }
  for (size_t i = 0; record.seconds && i < kNumSpanKinds; ++i) {
    const std::string kind = name_of(static_cast<SpanKind>(i));
    values.add("seconds/" + kind, (*record.seconds)[i]);
  }
  for (const ListField& field : list_fields()) {
    const auto& numbers = record.*field.values;
    for (size_t i = 0; i < numbers.size(); ++i) {
      values.add(c10::str(field.name, "/", i), numbers[i]);
    }
  }
  add_links(record.links, info.world_size, values);
  if (record.sample) {
    values.add_text("sample",
                    as_code(record.sample->prompt + record.sample->text));
  }
  return values;
}

}  // namespace

TensorBoard::TensorBoard(const RunInfo& info)
    : info_(info), path_(info.folder + "/" + file_name()) {
  const bool has_earlier = has_events(info.folder);
  file_.open(path_, std::ios::binary);
  TS_CHECK_IO(file_.good(), "monitor: cannot write ", path_, ".");
  Message version;
  version.fixed64(kWallTime, now_s()).bytes(kFileVersion, "brain.Event:2");
  write_record(version.str());
  // What an earlier start wrote of these steps does not count.
  if (info.first_step == 0 && !has_earlier) return;
  Message status, start;
  status.integer(kStatus, kStart);
  start.fixed64(kWallTime, now_s())
      .integer(kStep, info.first_step + 1)
      .bytes(kSessionLog, status.str());
  write_record(start.str());
}

void TensorBoard::validated_at_start(const Validation& validation) {
  Values values;
  values.add(kValidLossTag, validation.loss);
  write_values(0, values.str());
}

void TensorBoard::step(const StepRecord& record) {
  write_values(record.step, values_of(record, info_).str());
}

void TensorBoard::write_values(int64_t step, const std::string& values) {
  Message event;
  event.fixed64(kWallTime, now_s())
      .integer(kStep, step)
      .bytes(kSummary, values);
  write_record(event.str());
}

void TensorBoard::close(const RunEnd& /*end*/) { file_.close(); }

void TensorBoard::write_record(const std::string& event) {
  const std::string length = raw_bytes(static_cast<uint64_t>(event.size()));
  if (broken_) return;
  file_ << length << raw_bytes(masked_crc(length)) << event
        << raw_bytes(masked_crc(event)) << std::flush;
  if (file_.good()) return;
  broken_ = true;  // what comes behind half an event cannot be read
  log::warning("monitor: cannot write ", path_,
               ". Is the disk full? The run goes on without TensorBoard; "
               "metrics.jsonl has the same figures.");
}

}  // namespace tessera::monitor
