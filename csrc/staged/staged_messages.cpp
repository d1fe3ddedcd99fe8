// Messages between two ranks of the backend `staged`.
#include "staged_backend.h"
#include "staged_tensors.h"

namespace oases {

using namespace staged;

StagedMail& StagedBackend::mail() {
  check_process("a message");
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!mail_) mail_ = std::make_unique<StagedMail>(ranks_);
  return *mail_;
}

StagedStreams& StagedBackend::message_streams(const char* name, c10::Device device, int from, int to) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return made(name, message_streams_[{from, to}], [&] {
    DeviceArea area(ranks_->message_area(from, to), {from, to}, DeviceArea::message_slots(getSize()));
    return std::make_unique<StagedStreams>(ranks_, device, std::move(area), 1);
  });
}

StagedBackend::Work StagedBackend::message(const char* name, const at::Tensor& tensor, int other, int tag,
                                           bool sends) {
  check_dense(name, tensor);
  const int rank = getRank();
  TORCH_CHECK_VALUE(other >= 0 && other < getSize() && other != rank, name, ": rank ", rank,
                    " has no message with rank ", other, " in a group of ", getSize());
  if (tensor.is_cpu())
    return sends ? mail().send(tensor, other, tag, timeout_) : mail().receive(tensor, other, tag, timeout_);
  check_process(name);
  StagedStreams& by = message_streams(name, tensor.device(), sends ? rank : other, sends ? other : rank);
  const Patience patience(name, timeout_);
  return by.queue(sends ? c10d::OpType::SEND : c10d::OpType::RECV, {tensor}, {tensor}, patience, [&] {
    check_on_device(name, tensor, by.device());
    by.message(data_of(tensor), size_of(tensor), tensor.scalar_type(), patience);
  });
}

StagedBackend::Work StagedBackend::send(Tensors& tensors, int to, int tag) {
  check_one("send", tensors.size());
  return message("send", tensors.front(), to, tag, true);
}

StagedBackend::Work StagedBackend::recv(Tensors& tensors, int from, int tag) {
  check_one("recv", tensors.size());
  return message("recv", tensors.front(), from, tag, false);
}

StagedBackend::Work StagedBackend::recvAnysource(Tensors& tensors, int tag) {
  check_one("recv", tensors.size());
  check_dense("recv", tensors.front());
  TORCH_CHECK_VALUE(tensors.front().is_cpu(),
                    "staged does not receive a tensor of a device from any rank; name it");
  return mail().receive(tensors.front(), StagedMail::kAnyRank, tag, timeout_);
}

}  // namespace oases
