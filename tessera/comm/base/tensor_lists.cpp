#include "tessera/comm/base/tensor_lists.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>

#include "tessera/core/error.h"

namespace tessera::comm {

std::vector<int64_t> sizes_of(const TensorList& list) {
  std::vector<int64_t> sizes;
  sizes.reserve(list.size());
  for (const at::Tensor& tensor : list) sizes.push_back(tensor.numel());
  return sizes;
}

bool is_even(const TensorList& list) {
  return std::all_of(list.begin(), list.end(), [&](const at::Tensor& tensor) {
    return tensor.numel() == list.front().numel();
  });
}

// Room for the elements of all tensors of a list, one after the other.
at::Tensor flat_for(const TensorList& list, at::ScalarType dtype) {
  const std::vector<int64_t> sizes = sizes_of(list);
  const auto all = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  return at::empty({all}, at::TensorOptions(dtype));
}

// Parts of `flat`, as long as the tensors of `list`, in their shapes.
TensorList parts_of(const at::Tensor& flat, const TensorList& list) {
  TensorList parts;
  parts.reserve(list.size());
  int64_t offset = 0;
  for (const at::Tensor& tensor : list) {
    const int64_t numel = tensor.numel();
    parts.push_back(flat.narrow(0, offset, numel).view(tensor.sizes()));
    offset += numel;
  }
  return parts;
}

void copy_each(const TensorList& to, const TensorList& from) {
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
}

// The tensors of a list in one flat tensor.
at::Tensor flattened(const TensorList& list, at::ScalarType dtype) {
  at::Tensor flat = flat_for(list, dtype);
  copy_each(parts_of(flat, list), list);
  return flat;
}

const at::Tensor& only(const char* form, const TensorList& tensors) {
  TS_CHECK(tensors.size() == 1, form, ": got ", tensors.size(),
           " tensors of this rank. Give one.");
  return tensors.front();
}

void check_dtype(const char* form, const TensorList& list,
                 at::ScalarType dtype) {
  for (const at::Tensor& tensor : list) {
    TS_CHECK(tensor.scalar_type() == dtype, form, ": ", tensor.scalar_type(),
             " and ", dtype, " in one call. Give tensors of one dtype.");
  }
}

void check_pairs(const char* form, const TensorList& outputs,
                 const TensorList& inputs) {
  TS_CHECK(outputs.size() == inputs.size(), form, ": ", outputs.size(),
           " outputs for ", inputs.size(), " inputs. Give one for each.");
}

void check_fits(const char* form, const at::Tensor& own,
                const at::Tensor& place) {
  TS_CHECK(own.numel() == place.numel(), form, ": this rank's tensor has ",
           own.numel(), " elements, its place in the list ", place.numel(),
           ".");
}

void check_list(const char* form, const TensorList& list, int size) {
  TS_CHECK(static_cast<int>(list.size()) == size, form, ": a list of ",
           list.size(), " tensors in a group of ", size,
           " ranks. Give one for each rank.");
}

}  // namespace tessera::comm
