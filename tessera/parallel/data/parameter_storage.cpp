#include "tessera/parallel/data/parameter_storage.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <utility>

#include "tessera/core/memory_kind.h"

namespace tessera::parallel::data {
namespace {

// Only what is floating-point is rounded.
at::TensorOptions options_of_full(const at::Tensor& parameter,
                                  const at::TensorOptions& full) {
  const auto options = parameter.options().requires_grad(false).merge_in(full);
  const at::ScalarType type = parameter.scalar_type();
  return at::isFloatingType(type) ? options : options.dtype(type);
}

}  // namespace

at::Tensor window_of(const at::Tensor& tensor) {
  return tensor.variable_data();
}

void resize_storage(const at::Tensor& tensor, int64_t bytes) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  const auto size = static_cast<size_t>(bytes);
  TORCH_INTERNAL_ASSERT(storage.resizable());
  storage.set_data_ptr_noswap({nullptr, tensor.device()});
  storage.set_nbytes(0);  // should the next line throw
  if (size > 0) {
    storage.set_data_ptr_noswap(storage.allocator()->allocate(size));
  }
  storage.set_nbytes(size);
}

at::Tensor take_memory(const at::Tensor& tensor) {
  c10::StorageImpl& from = *tensor.storage().unsafeGetStorageImpl();
  const size_t bytes = from.nbytes();
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes,
      from.set_data_ptr({nullptr, tensor.device()}), from.allocator(),
      /*resizable=*/true);
  from.set_nbytes(0);
  return at::empty({0}, tensor.options())
      .set_(c10::Storage(std::move(storage)), tensor.storage_offset(),
            tensor.sizes(), tensor.strides());
}

at::Tensor pointer_to(const at::Tensor& tensor) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), tensor.storage().nbytes(),
      c10::DataPtr(nullptr, tensor.device()), /*allocator=*/nullptr,
      /*resizable=*/false);
  const at::Tensor pointer =
      at::empty({0}, tensor.options().requires_grad(false))
          .set_(c10::Storage(std::move(storage)), tensor.storage_offset(),
                tensor.sizes(), tensor.strides());
  point(pointer, tensor);
  return pointer;
}

void point(const at::Tensor& pointer, const at::Tensor& to) {
  TORCH_INTERNAL_ASSERT(pointer.storage_offset() == to.storage_offset() &&
                        pointer.strides() == to.strides());
  pointer.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
      {to.storage().mutable_data(), to.device()});
}

ParameterStorage::ParameterStorage(const Bundle& bundle, comm::Group& shards,
                                   SentCopies& sent,
                                   const at::TensorOptions& full,
                                   const KeptMemory& memory, int64_t versions)
    : bundle_(bundle),
      group_(shards),
      copies_(sent),
      full_options_(options_of_full(bundle.parameters[0].tensor, full)),
      apart_((bundle.is_sharded() && bundle.stage == 3) ||
             full_type() != bundle.dtype),
      direct_(bundle.is_sharded() && travels_alone(bundle.cut)),
      slots_(bundle.is_frozen ? 1 : versions) {
  TORCH_INTERNAL_ASSERT(slots_.size() == 1 || full_type() == bundle.dtype,
                        "versions of what gathers round");
  const at::NoGradGuard no_grad;
  const MemoryScope scope(MemoryKind::kParameters);
  std::vector<at::Tensor> filled;
  for (const auto& each : bundle.parameters) {
    filled.push_back(window_of(each.tensor));
  }
  for (Slot& slot : slots_) {
    bundle.is_sharded() ? lay_out_cut(slot, filled, memory)
                        : lay_out_whole(slot, filled);
  }
  for (const at::Tensor& own : slot(newest()).own) {
    local_.push_back(slots_.size() == 1 ? own : pointer_to(own));
  }
}

at::Tensor ParameterStorage::kept(const KeptMemory& memory,
                                  at::IntArrayRef sizes, at::ScalarType type) {
  return memory ? memory(sizes, type)
                : comm::zeros(group_, sizes, full_options_.dtype(type));
}

// The last version takes what is there.
void ParameterStorage::lay_out_whole(Slot& slot,
                                     const std::vector<at::Tensor>& filled) {
  TORCH_INTERNAL_ASSERT(filled.empty() || filled[0].device().type() ==
                                              full_options_.device().type(),
                        "what nobody gathers lies elsewhere than it is read");
  const bool is_last = &slot == &slots_.back();
  for (size_t i = 0; i < filled.size(); ++i) {
    at::Tensor parameter = bundle_.parameters[i].tensor;
    slot.own.push_back(is_last ? filled[i] : filled[i].clone());
    slot.full.push_back(apart_ ? filled[i].to(full_type()) : slot.own.back());
    if (is_last && apart_) parameter.set_data(slot.full.back());
    slot.whole.push_back(window_of(slot.full.back()));
  }
}

void ParameterStorage::lay_out_cut(Slot& slot,
                                   const std::vector<at::Tensor>& filled,
                                   const KeptMemory& memory) {
  const Cut& cut = bundle_.cut;
  if (apart_) slot.piece = kept(memory, {cut.numel()}, bundle_.dtype);
  for (size_t i = 0; i < cut.count(); ++i) {
    at::Tensor parameter = bundle_.parameters[i].tensor;
    slot.full.push_back(empty_full(slot, i, memory));
    slot.whole.push_back(window_of(slot.full[i]));
    slot.own.push_back(
        window_of(apart_ ? cut.in_piece(slot.piece, i, group_.rank())
                         : cut.rows_of(slot.full[i], i, group_.rank())));
    slot.own.back().copy_(filled[i]);
    parameter.set_data(slot.full[i]);
  }
  if (bundle_.stage == 3) free(slot);
}

at::Tensor ParameterStorage::empty_full(Slot& slot, size_t i,
                                        const KeptMemory& memory) {
  const Cut& cut = bundle_.cut;
  const auto& shape = cut.full_shapes()[i];
  const int64_t pieces = cut.ranks() * cut.numel();
  if (bundle_.stage == 3) {
    if (i == 0) {
      slot.flat = direct_ ? comm::FlatBuffer({{pieces}}, full_options_)
                          : comm::FlatBuffer(cut.full_shapes(), full_options_);
      full_bytes_ = static_cast<int64_t>(slot.flat.flat().nbytes());
    }
    if (!direct_) return slot.flat.view(i);
    slot.all_pieces = slot.flat.view(0);
  } else if (direct_) {
    slot.all_pieces = kept(memory, {pieces}, full_type());
  } else {
    return memory ? memory(shape, full_type())
                  : at::empty(shape, full_options_);
  }
  return window_of(
      slot.all_pieces.narrow(0, 0, c10::multiply_integers(shape)).view(shape));
}

void ParameterStorage::use(int64_t version) {
  if (slots_.size() == 1) return;
  for (size_t i = 0; i < bundle_.parameters.size(); ++i) {
    at::Tensor parameter = bundle_.parameters[i].tensor;
    parameter.set_data(slot(version).full[i]);
  }
}

void ParameterStorage::keep() {
  if (slots_.size() == 1) return;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < local_.size(); ++i) {
    slot(0).own[i].copy_(local_[i]);
    point(local_[i], slot(0).own[i]);
  }
}

void ParameterStorage::make_alike() {
  const at::NoGradGuard no_grad;
  for (Slot& each : slots_) {
    if (&each == &slot(newest())) continue;
    for (size_t i = 0; i < local_.size(); ++i) each.own[i].copy_(local_[i]);
  }
}

void ParameterStorage::begin_gather(comm::Mode mode, int64_t version) {
  if (!bundle_.is_sharded()) return;  // what is rounded is so in await_gather()
  const at::NoGradGuard no_grad;
  const MemoryScope scope(MemoryKind::kParameters);
  const Cut& cut = bundle_.cut;
  const Slot& from = slot(version);
  if (bundle_.stage == 3) resize_storage(from.flat.flat(), full_bytes_);
  sent_ = from.piece;
  if (direct_ && !apart_) {
    sent_ = from.all_pieces.narrow(0, group_.rank() * cut.numel(), cut.numel());
  } else if (!apart_ || from.piece.scalar_type() != full_type()) {
    sent_ = comm::zeros(group_, {cut.numel()}, full_options_);
    for (size_t i = 0; i < cut.count(); ++i) {
      cut.in_piece(sent_, i, group_.rank()).copy_(from.own[i]);
    }
  }
  if (group_.size() == 1) {  // its piece is all that is read, as it lies there
    copies_.copy(from.flat.flat(), sent_);
    return;
  }
  if (sent_.device().type() != full_options_.device().type()) {
    const at::Tensor there = at::empty({cut.numel()}, full_options_);
    copies_.copy(there, sent_);
    sent_ = there;
  }
  pieces_ = direct_ ? from.all_pieces.view({group_.size(), cut.numel()})
                    : at::empty({group_.size(), cut.numel()}, full_options_);
  work_ = group_.all_gather(pieces_, sent_, mode);
}

void ParameterStorage::await_gather(int64_t version) {
  const at::NoGradGuard no_grad;
  const Slot& to = slot(version);
  if (!bundle_.is_sharded()) {
    for (size_t i = 0; apart_ && i < to.whole.size(); ++i) {
      to.whole[i].copy_(to.own[i]);
    }
    return;
  }
  work_.wait();
  const bool is_apart = pieces_.defined() && !direct_;
  for (int64_t rank = 0; is_apart && rank < group_.size(); ++rank) {
    const at::Tensor piece = pieces_[rank];
    for (size_t i = 0; i < to.whole.size(); ++i) {
      bundle_.cut.rows_of(to.whole[i], i, rank)
          .copy_(bundle_.cut.in_piece(piece, i, rank));
    }
  }
  work_ = {};
  sent_ = pieces_ = at::Tensor();
}

std::vector<at::Tensor> ParameterStorage::full_masters() {
  const Slot& from = slot(newest());
  if (full_type() == bundle_.dtype) return from.whole;
  const at::NoGradGuard no_grad;
  const Cut& cut = bundle_.cut;
  std::vector<at::Tensor> masters;
  if (!bundle_.is_sharded()) {
    for (const auto& shard : local_) masters.push_back(shard.clone());
    return masters;
  }
  const at::Tensor pieces =
      at::empty({group_.size(), cut.numel()}, from.piece.options());
  group_.all_gather(pieces, from.piece).wait();
  for (size_t i = 0; i < from.whole.size(); ++i) {
    masters.push_back(at::empty(cut.full_shapes()[i], from.piece.options()));
    for (int64_t rank = 0; rank < group_.size(); ++rank) {
      cut.rows_of(masters[i], i, rank)
          .copy_(cut.in_piece(pieces[rank], i, rank));
    }
  }
  return masters;
}

void ParameterStorage::take(const std::vector<at::Tensor>& full_masters) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < local_.size(); ++i) {
    const at::Tensor& full = full_masters[i];
    local_[i].copy_(bundle_.is_sharded()
                        ? bundle_.cut.rows_of(full, i, group_.rank())
                        : full);
  }
}

void ParameterStorage::free(int64_t version) { free(slot(version)); }

void ParameterStorage::free(Slot& slot) {
  if (bundle_.is_sharded() && bundle_.stage == 3) {
    resize_storage(slot.flat.flat(), 0);
  }
}

}  // namespace tessera::parallel::data
