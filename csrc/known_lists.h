// The lists of tensors that an op sees: handed over by torch's dispatcher, or known to the library by a number, so that
// a caller need not send thousands of tensors through the dispatcher. Those are held (the tensors themselves, between
// calls) or have just been read (python_lists.h). An op checks them all alike, at every call.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <variant>

#include "torch_abi.h"

namespace ampctx {

// Whether the elements fill one block of memory without holes or overlap.
inline bool is_dense(const torch_abi::Layout& layout) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size)
  for (int64_t d = 0; d < layout.dim; ++d) {
    if (layout.sizes[d] > 1) dims.emplace_back(layout.strides[d], layout.sizes[d]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

// Whether element k in memory of one dense tensor is element k in memory of the other.
inline bool same_strides(const torch_abi::Layout& a, const torch_abi::Layout& b) {
  if (a.dim != b.dim) return false;
  for (int64_t d = 0; d < a.dim; ++d) {
    if (a.sizes[d] != b.sizes[d] || (a.sizes[d] > 1 && a.strides[d] != b.strides[d])) return false;
  }
  return true;
}

// Tensors of one device and dtype as they lay when they were read. Somebody else keeps them.
struct ReadList {
  struct Entry {
    void* data;
    int64_t numel;
    torch_abi::Layout layout;
    bool is_contiguous;
  };

  int32_t dtype;
  torch_abi::Device device;
  std::vector<Entry> tensors;
};

// Looks at a list of either kind, which it does not own.
class ListView {
 public:
  explicit ListView(const torch_abi::TensorList& tensors) : tensors_(&tensors) {}
  explicit ListView(const ReadList& read) : read_(&read) {}

  size_t size() const { return read_ ? read_->tensors.size() : tensors_->size(); }
  bool empty() const { return size() == 0; }

  bool is_strided(size_t i) const { return read_ || (*tensors_)[i].is_strided(); }
  bool is_resolved(size_t i) const { return read_ || (*tensors_)[i].is_resolved(); }
  int32_t dtype(size_t i) const { return read_ ? read_->dtype : (*tensors_)[i].dtype(); }
  torch_abi::Device device(size_t i) const { return read_ ? read_->device : (*tensors_)[i].device(); }
  int64_t numel(size_t i) const { return read_ ? read_->tensors[i].numel : (*tensors_)[i].numel(); }
  bool is_contiguous(size_t i) const {
    return read_ ? read_->tensors[i].is_contiguous : (*tensors_)[i].is_contiguous();
  }
  torch_abi::Layout layout(size_t i) const {
    return read_ ? read_->tensors[i].layout : (*tensors_)[i].layout_in_memory();
  }
  bool has_memory(size_t i, int64_t elements, int64_t element_bytes) const {
    return read_ || (*tensors_)[i].has_memory(elements, element_bytes);
  }
  void* data(size_t i, bool is_written) const {
    if (read_) return read_->tensors[i].data;
    return is_written ? (*tensors_)[i].mutable_data() : const_cast<void*>((*tensors_)[i].data());
  }
  // In a loop over the tensors: brings what it will look at into the cache.
  AMPCTX_HINT void prefetch_ahead(size_t i, size_t end) const {
    if (read_ || !prefetch::is_known_layout()) return;
    using prefetch::kStages;
    if (i + kStages[1] < end) (*tensors_)[i + kStages[1]].prefetch_handle();
    if (i + kStages[2] < end) (*tensors_)[i + kStages[2]].prefetch();
    if (i + kStages[3] < end) (*tensors_)[i + kStages[3]].prefetch_storage();
  }
  // Null for one that has been read.
  const torch_abi::Tensor* tensor(size_t i) const { return read_ ? nullptr : &(*tensors_)[i]; }

 private:
  const torch_abi::TensorList* tensors_ = nullptr;
  const ReadList* read_ = nullptr;
};

using KnownList = std::variant<torch_abi::TensorList, ReadList>;
using KnownListPointer = std::shared_ptr<const KnownList>;

inline ListView view(const KnownList& list) {
  return std::visit([](const auto& of_kind) { return ListView(of_kind); }, list);
}

class KnownLists {
 public:
  // For a list that is to come.
  int64_t new_number() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ++last_;
  }

  void put(int64_t number, KnownList&& list) {
    auto kept = std::make_shared<const KnownList>(std::move(list));
    const std::lock_guard<std::mutex> lock(mutex_);
    lists_[number].swap(kept);  // what was there goes after the lock
  }

  // Null for a number that was never given, or was released. A call keeps what it has found.
  KnownListPointer find(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = lists_.find(number);
    return found == lists_.end() ? nullptr : found->second;
  }

  void release(int64_t number) {
    KnownListPointer last;  // goes after the lock: letting a tensor go may call into Python
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = lists_.find(number);
    if (found == lists_.end()) return;
    last = std::move(found->second);
    lists_.erase(found);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, KnownListPointer> lists_;
  int64_t last_ = 0;
};

// Never destroyed: at the end of the process torch may be gone before this library.
inline KnownLists& known_lists() {
  static KnownLists* const lists = new KnownLists;
  return *lists;
}

}  // namespace ampctx
