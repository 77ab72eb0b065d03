#include "tessera/wrappers/load.h"

#include <ATen/ATen.h>
#include <torch/serialize/input-archive.h>

#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/wrappers/detail/heard_memory.h"

namespace tessera {
namespace {

using torch::serialize::InputArchive;

class Reader {
 public:
  explicit Reader(const std::string& file) : file_(file) {}

  // As Module::save() writes it.
  void read(const torch::nn::Module& module, InputArchive& archive,
            const std::string& prefix) {
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      take(item.key(), item.value(), archive, prefix, /*is_buffer=*/false);
    }
    for (const auto& item : module.named_buffers(/*recurse=*/false)) {
      take(item.key(), item.value(), archive, prefix, /*is_buffer=*/true);
    }
    for (const auto& child : module.named_children()) {
      if (!child.value()->is_serializable()) continue;
      InputArchive of_child;
      const std::string name = prefix + child.key();
      TS_CHECK_IO(archive.try_read(child.key(), of_child), file_,
                  ": holds nothing of ", name, ".");
      read(*child.value(), of_child, name + ".");
    }
  }

  void copy() const {
    const at::NoGradGuard no_grad;
    const wrappers::Unheard unheard;
    for (const auto& [to, from] : found_) to.copy_(from);
  }

 private:
  void take(const std::string& key, const at::Tensor& own,
            InputArchive& archive, const std::string& prefix, bool is_buffer) {
    if (!own.defined()) return;
    at::Tensor stored;
    TS_CHECK_IO(archive.try_read(key, stored, is_buffer), file_,
                ": holds no tensor ", prefix, key, ".");
    TS_CHECK_IO(stored.sizes() == own.sizes(), file_, ": ", prefix, key,
                " has ", stored.sizes(), ", and ", own.sizes(),
                " in the module. (Of a module that is sharded, whole ones are "
                "there while what gather() gives lives.)");
    found_.emplace_back(own, stored);
  }

  const std::string file_;
  std::vector<std::pair<at::Tensor, at::Tensor>> found_;  // to, from
};

}  // namespace

void load(torch::nn::Module& module, const std::string& file) {
  InputArchive archive;
  try {
    archive.load_from(file);
  } catch (const c10::Error& error) {
    TS_CHECK_IO(false, file,
                ": cannot be read: ", error.what_without_backtrace());
  }
  Reader reader(file);
  reader.read(module, archive, "");
  reader.copy();
}

}  // namespace tessera
