#include "tessera/nn/gpu/program.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <initializer_list>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/hash.h"
#include "tessera/core/log.h"
#include "tessera/nn/gpu/source.h"

namespace tessera::nn::gpu {
namespace {

class Library {
 public:
  explicit Library(std::initializer_list<const char*> names) {
    for (const char* name : names) {
      if (handle_ == nullptr) handle_ = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
    }
    TS_CHECK(handle_ != nullptr, "no ", *names.begin(), ": ", dlerror());
  }
  template <typename Function>
  Function* find(const char* name) const {
    void* const found = dlsym(handle_, name);
    TS_CHECK(found != nullptr, "no ", name, ": ", dlerror());
    return reinterpret_cast<Function*>(found);
  }

 private:
  void* handle_ = nullptr;  // for good
};

// As nvrtc.h has them, of CUDA 12 and 13.
struct Nvrtc {
  using Program = void*;

  // What NVRTC loads by itself it does not look for where itself is.
  Nvrtc() {
    int major = 0, minor = 0;
    from.find<int(int*, int*)>("nvrtcVersion")(&major, &minor);
    version = c10::str(major, ".", minor);
    dlopen(c10::str("libnvrtc-builtins.so.", version).c_str(),
           RTLD_NOW | RTLD_GLOBAL);
  }
  static const Nvrtc& get() {
    static const Nvrtc all;
    return all;
  }
  const Library from{"libnvrtc.so.13", "libnvrtc.so.12"};
  std::string version;
  int (*create)(Program*, const char* source, const char* name, int,
                const char* const*, const char* const*) =
      from.find<std::remove_pointer_t<decltype(create)>>("nvrtcCreateProgram");
  int (*compile)(Program, int count, const char* const* options) =
      from.find<std::remove_pointer_t<decltype(compile)>>(
          "nvrtcCompileProgram");
  int (*log_size)(Program, size_t*) =
      from.find<std::remove_pointer_t<decltype(log_size)>>(
          "nvrtcGetProgramLogSize");
  int (*log)(Program, char*) =
      from.find<std::remove_pointer_t<decltype(log)>>("nvrtcGetProgramLog");
  int (*code_size)(Program, size_t*) =
      from.find<std::remove_pointer_t<decltype(code_size)>>(
          "nvrtcGetCUBINSize");
  int (*code)(Program, char*) =
      from.find<std::remove_pointer_t<decltype(code)>>("nvrtcGetCUBIN");
  int (*destroy)(Program*) =
      from.find<std::remove_pointer_t<decltype(destroy)>>(
          "nvrtcDestroyProgram");
};

// As cuda.h has them.
struct Driver {
  const Library from{"libcuda.so.1"};
  int (*init)(unsigned flags) =
      from.find<std::remove_pointer_t<decltype(init)>>("cuInit");
  int (*count)(int*) =
      from.find<std::remove_pointer_t<decltype(count)>>("cuDeviceGetCount");
  int (*attribute)(int*, int which, int device) =
      from.find<std::remove_pointer_t<decltype(attribute)>>(
          "cuDeviceGetAttribute");
  int (*context)(void**) =
      from.find<std::remove_pointer_t<decltype(context)>>("cuCtxGetCurrent");
  int (*retain)(void** context, int device) =
      from.find<std::remove_pointer_t<decltype(retain)>>(
          "cuDevicePrimaryCtxRetain");
  int (*set_context)(void*) =
      from.find<std::remove_pointer_t<decltype(set_context)>>(
          "cuCtxSetCurrent");
  int (*load)(void** module, const void* image) =
      from.find<std::remove_pointer_t<decltype(load)>>("cuModuleLoadData");
  int (*function)(void**, void* module, const char* name) =
      from.find<std::remove_pointer_t<decltype(function)>>(
          "cuModuleGetFunction");
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned,
                unsigned, unsigned shared, void* stream, void** arguments,
                void** extra) =
      from.find<std::remove_pointer_t<decltype(launch)>>("cuLaunchKernel");
};

void check(int status, const char* what) {
  TS_CHECK(status == 0, what, " gave ", status);
}

// A thread that has asked the device nothing yet has none.
void require_context(const Driver& driver, int device) {
  void* context = nullptr;
  check(driver.context(&context), "cuCtxGetCurrent");
  if (context != nullptr) return;
  check(driver.retain(&context, device), "cuDevicePrimaryCtxRetain");
  check(driver.set_context(context), "cuCtxSetCurrent");
}

// As 89 for 8.9.
int capability_of(const Driver& driver, int device) {
  constexpr int kMajor = 75, kMinor = 76;
  int major = 0, minor = 0;
  check(driver.attribute(&major, kMajor, device), "cuDeviceGetAttribute");
  check(driver.attribute(&minor, kMinor, device), "cuDeviceGetAttribute");
  return 10 * major + minor;
}

std::filesystem::path cache_folder() {
  const char* const cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && *cache != '\0') {
    return std::filesystem::path(cache) / "tessera";
  }
  const char* const home = std::getenv("HOME");
  if (home == nullptr || *home == '\0') return {};
  return std::filesystem::path(home) / ".cache" / "tessera";
}

// Beside what an architecture and a type say.
constexpr std::array kOptions = {"--std=c++20",
                                 "--device-as-default-execution-space"};

uint64_t hash_of_source() {
  uint64_t hash = kThreads;
  for (const std::string_view option : kOptions) hash = hash64(option, hash);
  for (const auto& [name, text] : kSource) hash = hash64(text, hash);
  return hash;
}

// Where the code for an architecture and a type is kept; empty: nowhere.
std::filesystem::path file_for(const std::string& architecture, int bits) {
  const std::filesystem::path folder = cache_folder();
  if (folder.empty()) return {};
  return folder / c10::str(architecture, "-", bits, "-nvrtc",
                           Nvrtc::get().version, "-", hash_of_source(),
                           ".cubin");
}

// Empty where there is none, or none that can be read.
std::string kept_code(const std::filesystem::path& file) {
  std::error_code none;
  if (file.empty() || !std::filesystem::exists(file, none)) return {};
  try {
    return read_file(file);
  } catch (const std::exception& error) {
    log::debug("loops for the GPU are compiled anew: ", message_of(error));
    return {};
  }
}

void keep(const std::filesystem::path& file, const std::string& code) {
  if (file.empty()) return;
  try {
    std::filesystem::create_directories(file.parent_path());
    write_file_atomic(file, code);
  } catch (const std::exception& error) {
    log::debug("loops for the GPU are not kept: ", message_of(error));
  }
}

// Those of one GPU, the current one where they are made, and one type.
class Loops {
 public:
  Loops(int device, int bits)
      : device_(device), capability_(capability_of(driver_, device)) {
    require_context(driver_, device);
    const std::string architecture = c10::str("sm_", capability_);
    const std::filesystem::path file = file_for(architecture, bits);
    const std::string kept = kept_code(file);
    if (!kept.empty() && driver_.load(&module_, kept.c_str()) == 0) return;
    const std::string code = compile(architecture, bits);
    check(driver_.load(&module_, code.c_str()), "cuModuleLoadData");
    keep(file, code);
  }

  void launch(const std::string& name, int64_t blocks, void* stream,
              void** arguments) {
    require_context(driver_, device_);
    const std::lock_guard lock(mutex_);
    void*& function = functions_[name];
    if (function == nullptr) {
      check(driver_.function(&function, module_, name.c_str()),
            "cuModuleGetFunction");
    }
    check(driver_.launch(function, static_cast<unsigned>(blocks), 1, 1,
                         static_cast<unsigned>(kThreads), 1, 1, 0, stream,
                         arguments, nullptr),
          name.c_str());
  }

  int major() const { return capability_ / 10; }

 private:
  const Driver driver_;
  const int device_, capability_;
  void* module_ = nullptr;
  std::mutex mutex_;
  std::map<std::string, void*> functions_;
};

// Null where they cannot be made.
Loops* loops_of(const at::Tensor& x) {
  static auto* const all =
      new std::map<std::pair<int, int>, std::optional<Loops>>();  // for good
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const int device = x.device().index();
  const int bits = 8 * static_cast<int>(x.itemsize());
  const auto [found, is_new] = all->try_emplace({device, bits});
  if (is_new) {
    try {
      const c10::DeviceGuard there(x.device());  // a module is one device's
      found->second.emplace(device, bits);
    } catch (const std::exception& error) {
      log::warning(
          "there are no loops for the GPU, LibTorch's operators are in "
          "their place: ",
          message_of(error));
    }
  }
  return found->second ? &*found->second : nullptr;
}

const char* type_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kDouble:
      return "f64";
    case at::kFloat:
      return "f32";
    case at::kBFloat16:
      return "bf16";
    default:
      return nullptr;
  }
}

}  // namespace

std::string compile(const std::string& architecture, int bits) {
  const Nvrtc& nvrtc = Nvrtc::get();
  Nvrtc::Program program = nullptr;
  constexpr auto kIncluded = kSource.size() - 1;
  std::array<const char*, kIncluded> names{}, texts{};
  for (size_t i = 0; i < kIncluded; ++i) {
    names[i] = kSource[i + 1].name;
    texts[i] = kSource[i + 1].text;
  }
  check(nvrtc.create(&program, kSource[0].text, kSource[0].name,
                     static_cast<int>(kIncluded), texts.data(), names.data()),
        "nvrtcCreateProgram");
  const std::string target = "--gpu-architecture=" + architecture;
  const std::string threads = c10::str("-DTESSERA_GPU_THREADS=", kThreads);
  const std::string type = c10::str("-DTESSERA_GPU_TYPE=", bits);
  std::vector<const char*> options = {target.c_str(), threads.c_str(),
                                      type.c_str()};
  options.insert(options.end(), kOptions.begin(), kOptions.end());
  const int status =
      nvrtc.compile(program, static_cast<int>(options.size()), options.data());
  std::string text;
  const auto take = [&](auto size_of, auto content_of) {
    size_t size = 0;
    size_of(program, &size);
    text.resize(size);
    content_of(program, text.data());
    return text;
  };
  if (status != 0) {
    const std::string words = take(nvrtc.log_size, nvrtc.log);
    nvrtc.destroy(&program);
    TS_CHECK(false, "NVRTC refuses loops.cu for ", architecture, ": ", words);
  }
  std::string code = take(nvrtc.code_size, nvrtc.code);
  nvrtc.destroy(&program);
  return code;
}

bool runs(const at::Tensor& x) {
  return x.is_cuda() && type_of(x) != nullptr && loops_of(x) != nullptr;
}

int capability_of(const at::Tensor& x) {
  return runs(x) ? loops_of(x)->major() : 0;
}

int least_capability() {
  const Driver driver;
  check(driver.init(0), "cuInit");
  int count = 0, least = 0;
  check(driver.count(&count), "cuDeviceGetCount");
  for (int device = 0; device < count; ++device) {
    const int one = capability_of(driver, device);
    least = device == 0 ? one : std::min(least, one);
  }
  return least;
}

int64_t blocks_for(int64_t elements) {
  constexpr int64_t kMost = 4096;
  return std::min(kMost, (elements + kThreads - 1) / kThreads);
}

void launch(const std::string& loop, const at::Tensor& x, int64_t blocks,
            void** arguments) {
  if (blocks == 0) return;
  const c10::DeviceGuard there(x.device());
  const c10::impl::VirtualGuardImpl devices(x.device().type());
  void* const stream = devices.getStream(x.device()).native_handle();
  loops_of(x)->launch(c10::str(loop, "_", type_of(x)), blocks, stream,
                      arguments);
}

}  // namespace tessera::nn::gpu
