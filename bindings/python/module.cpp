// The extension module tessera_torch._C: see tessera_torch/__init__.py.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings/python/python_backend.h"
#include "tessera/comm/shm/shm_backend.h"
#include "tessera/core/error.h"
#include "tessera/core/version.h"

namespace tessera::python {
namespace {

// Blocks until all ranks of the group are here.
c10::intrusive_ptr<c10d::Backend> make_backend(
    const c10::intrusive_ptr<c10d::Store>& store, const std::string& group,
    const std::vector<int64_t>& ranks, int64_t rank, int64_t ranks_on_host,
    std::chrono::milliseconds timeout) {
  comm::Rendezvous rendezvous(store, "");
  const comm::shm::Place place{.group = group,
                               .rank = rank,
                               .ranks = ranks,
                               .ranks_on_host = ranks_on_host,
                               .timeout = timeout};
  c10::intrusive_ptr<comm::shm::ShmBackend> shm;
  try {
    shm = c10::make_intrusive<comm::shm::ShmBackend>(rendezvous, place);
  } catch (const std::exception& error) {
    // Else the others would wait for this rank until their time-out.
    rendezvous.announce_failure(
        c10::str("rank ", rank, " failed: ", message_of(error)));
    throw;
  }
  // The wrapper owns the backend, and with it this function.
  auto fail = [backend = shm.get()](const std::string& why) {
    backend->fail(why);
  };
  const std::string where =
      c10::str("on rank ", rank, " of ", ranks.size(), " in group '", group,
               "', with a timeout of ", timeout.count(), " ms");
  return c10::make_intrusive<PythonBackend>(std::move(shm), where,
                                            std::move(fail));
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  // Brings the types of the arguments and of the result.
  py::module_::import("torch._C._distributed_c10d");
  module.attr("torch_version") = kTorchVersion;
  module.def("make_backend", &make_backend, py::arg("store"), py::arg("group"),
             py::arg("ranks"), py::arg("rank"), py::arg("ranks_on_host"),
             py::arg("timeout"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace tessera::python
