// Lists of tensors, one for each rank, and their elements in one flat tensor.
//
// Errors: TS_CHECK, naming the form of c10d that was called.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::comm {

using TensorList = std::vector<at::Tensor>;

std::vector<int64_t> sizes_of(const TensorList& list);
// Whether all are of one size.
bool is_even(const TensorList& list);
// Room for the elements of all, one after the other.
at::Tensor flat_for(const TensorList& list, at::ScalarType dtype);
// A copy of the elements of all, one after the other.
at::Tensor flattened(const TensorList& list, at::ScalarType dtype);
// Parts of `flat`, as long as the tensors of `list`, in their shapes.
TensorList parts_of(const at::Tensor& flat, const TensorList& list);
void copy_each(const TensorList& to, const TensorList& from);

// The one tensor of a list.
const at::Tensor& only(const char* form, const TensorList& tensors);
// A list with one tensor for each of `size` ranks.
void check_list(const char* form, const TensorList& list, int size);
void check_dtype(const char* form, const TensorList& list,
                 at::ScalarType dtype);
void check_pairs(const char* form, const TensorList& outputs,
                 const TensorList& inputs);
// This rank's tensor, and its place in a list.
void check_fits(const char* form, const at::Tensor& own,
                const at::Tensor& place);

}  // namespace tessera::comm
