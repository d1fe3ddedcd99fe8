// What the `staged` backend asks of tensors, and their memory.
#pragma once

#include <ATen/ATen.h>

#include <numeric>
#include <vector>

namespace oases::staged {

inline void check_layout(const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, name,
                    " over shared memory takes dense tensors, got one on ", tensor.device(), " of layout ",
                    tensor.layout(), "; call .to_dense() first");
}

inline void check_on_device(const char* name, const at::Tensor& tensor, c10::Device device) {
  TORCH_CHECK_VALUE(tensor.device() == device, name, ": tensors of ", device, " and ", tensor.device(),
                    "; give all on one device");
}

// Of a tensor that is used as it lies in memory.
inline void check_dense(const char* name, const at::Tensor& tensor) {
  check_layout(name, tensor);
  TORCH_CHECK_VALUE(tensor.is_non_overlapping_and_dense(), name, ": the tensor of shape ", tensor.sizes(),
                    " and strides ", tensor.strides(), " has gaps; call .contiguous() first");
}

inline void check_contiguous(const char* name, const at::Tensor& tensor) {
  check_layout(name, tensor);
  TORCH_CHECK_VALUE(tensor.is_contiguous(), name, ": the tensor of shape ", tensor.sizes(), " and strides ",
                    tensor.strides(), " is not contiguous; call .contiguous() first");
}

inline void check_one(const char* name, size_t tensors) {
  TORCH_CHECK_VALUE(tensors == 1, name, " takes one tensor for this rank, got ", tensors);
}

inline void check_count(const char* name, const char* what, size_t tensors, int64_t wanted) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(tensors) == wanted, name, " of this rank takes ", wanted, " ", what,
                    ", got ", tensors);
}

inline void check_alike(const char* name, const at::Tensor& tensor, const at::Tensor& other) {
  check_layout(name, tensor);
  TORCH_CHECK_VALUE(tensor.scalar_type() == other.scalar_type() && tensor.numel() == other.numel(), name,
                    ": tensors differ: ", tensor.scalar_type(), " of shape ", tensor.sizes(), ", and ",
                    other.scalar_type(), " of shape ", other.sizes(), "; give equal types and sizes");
}

inline void check_parts(const char* name, const at::Tensor& whole, const at::Tensor& part, int64_t parts) {
  check_contiguous(name, whole), check_contiguous(name, part);
  TORCH_CHECK_VALUE(whole.scalar_type() == part.scalar_type() && whole.numel() == part.numel() * parts, name,
                    ": ", whole.scalar_type(), " of shape ", whole.sizes(), " is not ", parts, " times ",
                    part.scalar_type(), " of shape ", part.sizes());
}

// Bytes of each rank's part of an all-to-all's tensor. splits: rows of each, or none where they are equal.
inline std::vector<int64_t> bytes_of_parts(const char* what, const at::Tensor& tensor,
                                           const std::vector<int64_t>& splits, int ranks) {
  check_contiguous("all_to_all", tensor);
  const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 0;
  TORCH_CHECK_VALUE(splits.empty() ? rows % ranks == 0
                                   : static_cast<int>(splits.size()) == ranks &&
                                         std::accumulate(splits.begin(), splits.end(), int64_t{0}) == rows,
                    "all_to_all: the ", what, " of shape ", tensor.sizes(), " is not cut in ", ranks,
                    " parts by splits ", splits);
  const int64_t row = rows ? static_cast<int64_t>(tensor.nbytes()) / rows : 0;
  std::vector<int64_t> bytes(ranks, rows / ranks * row);
  for (size_t i = 0; i < splits.size(); ++i) bytes[i] = splits[i] * row;
  return bytes;
}

inline void check_all_to_all(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                             int ranks) {
  check_count("all_to_all", "outputs", outputs.size(), ranks);
  check_count("all_to_all", "inputs", inputs.size(), ranks);
  for (const auto& list : {inputs, outputs})
    for (const auto& tensor : list) {
      check_layout("all_to_all", tensor);
      TORCH_CHECK_VALUE(tensor.scalar_type() == inputs[0].scalar_type(),
                        "all_to_all: tensors of several types; give one");
    }
}

// c10d's lists hold this process's lists; this backend has one.
inline std::vector<at::Tensor> first_of(const std::vector<std::vector<at::Tensor>>& lists) {
  return lists.empty() ? std::vector<at::Tensor>{} : lists.front();
}

inline std::byte* data_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }
inline int64_t size_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

inline std::vector<at::Tensor> joined(std::vector<at::Tensor> tensors,
                                      const std::vector<at::Tensor>& others) {
  tensors.insert(tensors.end(), others.begin(), others.end());
  return tensors;
}

// Contiguous memory that stands for `tensors` while it lives: theirs where it is so already, as on a device, whose
// streams use it later.
inline std::vector<at::Tensor> contiguous(const std::vector<at::Tensor>& tensors, bool filled) {
  std::vector<at::Tensor> all;
  for (const auto& tensor : tensors)
    if (!tensor.is_cpu()) check_contiguous("staged", tensor);
  for (const auto& tensor : tensors)
    all.push_back(tensor.is_contiguous() ? tensor
                  : filled               ? tensor.contiguous()
                                         : at::empty(tensor.sizes(), tensor.options()));
  return all;
}

inline void bring_back(const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to) {
  for (size_t i = 0; i < to.size(); ++i)
    if (!from[i].is_same(to[i])) at::Tensor(to[i]).copy_(from[i]);
}

template <typename Pointers>
Pointers pointers_of(const std::vector<at::Tensor>& tensors) {
  Pointers pointers;
  for (const auto& tensor : tensors) pointers.push_back(data_of(tensor));
  return pointers;
}

template <typename Pointers>
Pointers parts_of(const at::Tensor& tensor, int parts) {
  Pointers pointers;
  for (int part = 0; part < parts; ++part)
    pointers.push_back(data_of(tensor) + part * (size_of(tensor) / parts));
  return pointers;
}

}  // namespace oases::staged
