// Lists of tensors that the library keeps between calls, so that a caller need not hand thousands of tensors through
// torch's dispatcher each time. Held are the tensors, not what is known of them: an op checks them at every call.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>

#include "torch_abi.h"

namespace ampctx {

using HeldList = std::shared_ptr<const torch_abi::TensorList>;

class HeldLists {
 public:
  int64_t hold(torch_abi::TensorList&& tensors) {
    const std::lock_guard<std::mutex> lock(mutex_);
    lists_.emplace(++last_, std::make_shared<const torch_abi::TensorList>(std::move(tensors)));
    return last_;
  }

  // Null for a number that was never given, or was released. A call keeps what it has found.
  HeldList find(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = lists_.find(number);
    return found == lists_.end() ? nullptr : found->second;
  }

  void release(int64_t number) {
    HeldList last;  // goes after the lock: letting a tensor go may call into Python
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = lists_.find(number);
    if (found == lists_.end()) return;
    last = std::move(found->second);
    lists_.erase(found);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, HeldList> lists_;
  int64_t last_ = 0;
};

// Never destroyed: at the end of the process torch may be gone before this library.
inline HeldLists& held_lists() {
  static HeldLists* const lists = new HeldLists;
  return *lists;
}

}  // namespace ampctx
