// Takes the arguments of a boxed function off its stack.
#pragma once

#include "known_lists.h"

namespace ampctx {

// In their order. Keeps the lists. `held`: the stack has lists as numbers of known lists, 0 for an empty one.
class Arguments {
 public:
  Arguments(const char* op, const StableIValue* stack, bool held) : op_(op), next_(stack), held_(held) {}

  ListView list() {
    KnownListPointer list;
    if (!held_) {
      list = std::make_shared<const KnownList>(torch_abi::to_tensor_list(*next_++));
    } else if (const int64_t number = integer()) {
      list = known_lists().find(number);
      if (!list) unknown_ = number;
    }
    lists_.push_back(list ? std::move(list) : std::make_shared<const KnownList>());
    return view(*lists_.back());
  }
  torch_abi::Tensor tensor() { return torch_abi::Tensor(*next_++); }
  double number() { return torch_abi::to_scalar<double>(*next_++); }
  int64_t integer() { return torch_abi::to_scalar<int64_t>(*next_++); }
  bool flag() { return torch_abi::to_scalar<bool>(*next_++); }

  // After the last argument: whoever throws before owns none of those that it has not taken.
  void check_held() const {
    if (unknown_) fail(op_, ": there is no held list of number ", unknown_);
  }

 private:
  const char* op_;
  const StableIValue* next_;
  bool held_;
  int64_t unknown_ = 0;
  std::vector<KnownListPointer> lists_;
};

}  // namespace ampctx
