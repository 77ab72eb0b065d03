// Stands in for the backend beside a LibTorch without CUDA.
#include "tessera/comm/nccl/nccl_backend.h"
#include "tessera/core/error.h"

namespace tessera::comm::nccl {

bool is_built() { return false; }

std::string note() {
  return "this program was built beside a LibTorch without CUDA, or without "
         "the headers of CUDA and NCCL. Build it with './dev build --cuda', or "
         "use auto, shm or gloo, which go through the CPU.";
}

std::string gpu_of_this_thread() { return ""; }

Connection connect(const Rendezvous&, const Place&,
                   const std::shared_ptr<Watch>&) {
  TS_CHECK_CONFIG(false, "comm.backend=nccl: ", note());
}

}  // namespace tessera::comm::nccl
