// The arguments of one call of an op, in their order, and its results.
#pragma once

#include <deque>
#include <optional>

#include "tensors.h"

namespace ampctx {

// A number or a tensor that a plan was given.
struct Value {
  double number = 0;
  int64_t integer = 0;
  View view;
};

class Arguments {
 public:
  // Of a boxed function: takes them off the stack, and owns them.
  explicit Arguments(StableIValue* stack) : stack_(stack) {}
  // Of a plan, which keeps them. The results go into tensors that are the last values.
  Arguments(const std::vector<const Views*>& lists, const std::vector<Value>& values)
      : lists_(&lists), values_(&values) {}

  // `is_written`: whether the op writes them.
  const Views& list(bool is_written = false) {
    if (lists_) return *lists_->at(next_list_++);
    owned_.push_back(torch_abi::to_tensor_list(take()));
    Views& views = views_.emplace_back();
    views.reserve(owned_.back().size());
    for (const torch_abi::Tensor& tensor : owned_.back()) views.push_back(view_of(tensor, is_written));
    return views;
  }
  View tensor(bool is_written = false) {
    if (values_) return value().view;
    torch_abi::TensorList& list = owned_.emplace_back();
    list.emplace_back(take());
    return view_of(list.back(), is_written);
  }
  double number() { return values_ ? value().number : torch_abi::to_scalar<double>(take()); }
  int64_t integer() { return values_ ? value().integer : torch_abi::to_scalar<int64_t>(take()); }
  bool flag() { return values_ ? value().integer != 0 : torch_abi::to_scalar<bool>(take()); }

  // Memory for the next result: `elements`, or one of a 0-d tensor if null. After the last argument.
  void* result(const char* op, const int64_t* elements, int32_t dtype, torch_abi::Device device) {
    if (!values_) return results_.emplace_back(torch_abi::empty(elements, dtype, device)).mutable_data();
    const View& to = value().view;
    if (to.dtype != dtype || to.device != device || to.numel != (elements ? *elements : 1) || !to.is_contiguous) {
      fail(op, ": a result does not fit the tensor that was given for it");
    }
    return to.data;
  }
  // Puts the results on the stack.
  void finish() {
    for (size_t i = 0; i < results_.size(); ++i) stack_[i] = results_[i].release();
  }

 private:
  StableIValue take() { return stack_[next_++]; }
  const Value& value() { return values_->at(next_value_++); }

  StableIValue* stack_ = nullptr;
  const std::vector<const Views*>* lists_ = nullptr;
  const std::vector<Value>* values_ = nullptr;
  size_t next_ = 0, next_list_ = 0, next_value_ = 0;
  std::deque<torch_abi::TensorList> owned_;
  std::deque<Views> views_;
  torch_abi::TensorList results_;
};

}  // namespace ampctx
