// The backend `staged` on tensors of the virtual device, whose streams are threads of this process, as its ranks are: a
// sanitizer sees words, slots and scratch memory that nothing orders.
#include "nodes.h"
#include "staged/staged_backend.h"
#include "virtual_device/words.h"

using oases::StagedBackend;
using oases_tests::numbers;

namespace {

constexpr int64_t kPiece = 2 << 20;
// None, one, less than a piece, and several pieces that are not cut evenly.
const int64_t kCounts[] = {0, 1, 1000, 5 * kPiece / 4 + 3};

void know_the_device() {
  static const bool known = [] {
    c10::register_privateuse1_backend("virtual");  // which makes it the accelerator, whose memory is pinned
    at::RegisterPrivateUse1HooksInterface(new virtual_device::Hooks());
    oases::register_stream_words(virtual_device::kType, new virtual_device::Words());
    return true;
  }();
  static_cast<void>(known);
}

void run_streams(int size, const std::function<void(int, StagedBackend&, c10::Device)>& body) {
  know_the_device();
  const auto store = c10::make_intrusive<c10d::HashStore>();
  oases_tests::on_threads(size, [&](int rank) {
    const c10::Device device(virtual_device::kType, static_cast<c10::DeviceIndex>(rank));
    const c10::DeviceGuard on(device);
    const auto backend = c10::make_intrusive<StagedBackend>(store, rank, size, std::chrono::seconds(60));
    body(rank, *backend, device);
    virtual_device::synchronize(device.index());
  });
}

c10::intrusive_ptr<c10d::Work> reduce_all(c10d::Backend& backend, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{tensor};
  return backend.allreduce(tensors, {});
}

// Collectives of one count that are under way together, and whose tensors are let go at once.
void check_under_way(int rank, c10d::Backend& backend, c10::Device device, int64_t count) {
  const int size = backend.getSize();
  std::vector<at::Tensor> each;
  for (int other = 0; other < size; ++other) each.push_back(numbers(other, count));
  const at::Tensor added = size * numbers(0, count) + size * (size - 1) / 2;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  const auto sum = numbers(rank, count).to(device);
  works.push_back(reduce_all(backend, sum));
  auto whole = at::empty({size * count}, sum.options());
  {
    auto part = numbers(rank, count).to(device);  // let go while it is on the way
    works.push_back(backend._allgather_base(whole, part, {}));
  }
  auto part = at::empty({count}, sum.options());
  {
    auto input = at::cat(each).to(device);
    works.push_back(backend._reduce_scatter_base(part, input, {}));
  }
  works.push_back(reduce_all(backend, sum));  // of the sums, which nobody has waited for
  std::vector<at::Tensor> sent{numbers(rank, count).to(device)}, received{at::empty_like(sum)};
  works.push_back(backend.send(sent, (rank + 1) % size, 0));
  works.push_back(backend.recv(received, (rank + size - 1) % size, 0));
  auto input = at::cat(each).to(device), output = at::empty_like(whole);
  std::vector<int64_t> even;
  works.push_back(backend.alltoall_base(output, input, even, even, {}));
  for (const auto& work : works) work->wait();
  EXPECT_TRUE(at::equal(sum.cpu(), size * added)) << count;
  EXPECT_TRUE(at::equal(whole.cpu(), at::cat(each))) << count;
  EXPECT_TRUE(at::equal(part.cpu(), size * numbers(rank, count))) << count;
  EXPECT_TRUE(at::equal(received[0].cpu(), numbers((rank + size - 1) % size, count))) << count;
  EXPECT_TRUE(at::equal(output.cpu(), at::cat(std::vector<at::Tensor>(size, numbers(rank, count))))) << count;
}

}  // namespace

TEST(StagedStreams, CollectivesThatAreUnderWayTogetherUnderRandomDelays) {
  virtual_device::settings.longest_delay = 1e-3;
  for (const int size : {2, 3})
    run_streams(size, [](int rank, StagedBackend& backend, c10::Device device) {
      for (const int64_t count : kCounts)
        for (int seed = 0; seed < 2; ++seed) check_under_way(rank, backend, device, count);
    });
  virtual_device::settings.longest_delay = 0;
}

TEST(HostPassage, CollectivesOverNodesThatAreUnderWayTogetherUnderRandomDelays) {
  know_the_device();
  virtual_device::settings.longest_delay = 1e-3;
  oases_tests::run_nodes([](int rank, oases::NodesBackend& backend) {
    const c10::Device device(virtual_device::kType, static_cast<c10::DeviceIndex>(rank));
    const c10::DeviceGuard on(device);
    for (const int64_t count : {0, 1, 1000, 2'200'001})  // the last in two pieces
      check_under_way(rank, backend, device, count);
    virtual_device::synchronize(device.index());
  });
  virtual_device::settings.longest_delay = 0;
}
