// Runs a function over the blocks of tensor lists, in one parallel region per call.
//
// Threads get equal shares of the elements of all tensors laid end to end, so that neither one huge tensor nor
// thousands of tiny ones leave a thread idle. Each tensor is cut into blocks of kBlock elements from its own start, so
// blocks and results do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <tuple>
#include <vector>

#include "../ops.h"
#include "simd.h"

namespace ampctx::cpu {

constexpr int64_t kAtOnce = 64;    // blocks that a function without buffers takes as one, to read from several pages
constexpr int64_t kGrain = 32768;  // elements below which a second thread does not pay

struct Block {
  int64_t tensor;
  int64_t begin;  // element of the tensor
  int64_t size;
  int64_t number;  // among all blocks of the call
};

inline int64_t block_count(int64_t elements) { return (elements + kBlock - 1) / kBlock; }

// function(Block) is called from several threads and must not throw. `at_once`: so many neighbouring blocks of a tensor
// come as one, kAtOnce for a function without buffers.
template <class Function>
void for_each_block(const Context& context, const TensorLists& lists, const Function& function, int64_t at_once = 1) {
  std::vector<int64_t> first_element, first_block;
  first_element.reserve(lists.numel.size() + 1);
  first_block.reserve(lists.numel.size());
  int64_t elements = 0, blocks = 0;
  for (const int64_t numel : lists.numel) {
    first_element.push_back(elements);
    first_block.push_back(blocks);
    elements += numel;
    blocks += block_count(numel);
  }
  first_element.push_back(elements);
  // The blocks that start in [begin, end) of the elements of all tensors.
  const auto walk = [&](int64_t begin, int64_t end) {
    const auto after = std::upper_bound(first_element.begin(), first_element.end(), begin);
    int64_t tensor = after - first_element.begin() - 1;
    int64_t block = block_count(begin - first_element[tensor]);
    for (; tensor < lists.size() && first_element[tensor] < end; ++tensor, block = 0) {
      const int64_t stop = std::min(lists.numel[tensor], end - first_element[tensor]);
      const int64_t last = std::min(lists.numel[tensor], block_count(stop) * kBlock);
      for (; block * kBlock < stop; block += at_once) {
        const int64_t first = block * kBlock;
        function(Block{tensor, first, std::min(at_once * kBlock, last - first), first_block[tensor] + block});
      }
    }
  };
  const auto body = [](int64_t begin, int64_t end, void* self) { (*static_cast<decltype(walk)*>(self))(begin, end); };
  context.parallel_for(0, elements, kGrain, body, const_cast<void*>(static_cast<const void*>(&walk)));
}

inline void* memory(const TensorLists& lists, int list, const Block& block) {
  return static_cast<char*>(lists.pointer[list][block.tensor]) + block.begin * element_size(lists.dtype[list]);
}

template <class T>
const Arithmetic<T>& arithmetic() {
  return std::get<const Arithmetic<T>&>(std::tie(simd().f32, simd().f64));
}
template <class T>
constexpr int kOwnType = static_cast<int>(sizeof(T) == sizeof(double) ? DType::f64 : DType::f32);

// Gives blocks in T, the type of the arithmetic: in place if the memory holds T, else through a buffer.
template <class T>
class BlockAccess {
 public:
  struct alignas(64) Buffer {
    T data[kBlock];
  };

  explicit BlockAccess(const TensorLists& lists)
      : lists_(lists),
        load_(simd().load[sizeof(T) == sizeof(double)]),
        store_(simd().store[sizeof(T) == sizeof(double)]) {}

  // A block to read, or to change in place and store by write().
  T* read(int list, const Block& block, Buffer& buffer) const {
    const Convert convert = load_[static_cast<int>(lists_.dtype[list])];
    if (!convert) return static_cast<T*>(memory(lists_, list, block));
    convert(memory(lists_, list, block), buffer.data, block.size);
    return buffer.data;
  }

  // The memory to fill before write() stores it.
  T* target(int list, const Block& block, Buffer& buffer) const {
    return store_[static_cast<int>(lists_.dtype[list])] ? buffer.data : static_cast<T*>(memory(lists_, list, block));
  }

  void write(int list, const Block& block, const Buffer& buffer) const {
    const Convert convert = store_[static_cast<int>(lists_.dtype[list])];
    if (convert) convert(buffer.data, memory(lists_, list, block), block.size);
  }

 private:
  const TensorLists& lists_;
  const Convert* load_;
  const Convert* store_;
};

// Adds up the partial results of each tensor's blocks, partial[count * block.number ...], in order, and calls
// function(tensor, totals).
template <int count, class Function>
void for_each_total(const TensorLists& lists, const double* partial, const Function& function) {
  for (int64_t tensor = 0; tensor < lists.size(); ++tensor) {
    double total[count] = {};
    for (int64_t block = block_count(lists.numel[tensor]); block > 0; --block) {
      for (double& value : total) value += *partial++;
    }
    function(tensor, total);
  }
}

// From several threads.
inline void note(FoundInf found_inf, bool finite) {
  if (!finite) __atomic_store_n(found_inf.word, found_inf.raised, __ATOMIC_RELAXED);
}

}  // namespace ampctx::cpu
