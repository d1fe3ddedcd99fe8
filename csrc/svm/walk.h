// Simplex walk between vertices of the hinge loss with a weighted l1 penalty; see oases_svm/vertex.py.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace oases::svm {

enum class Status { kMinimum, kLimit, kRefresh };

// Columns h [n, m]; a basis of equally many columns S and rows E, which determine
// coefficients and multipliers.
class Walk {
 public:
  // columns: [n, m], column after column; targets and weights: [n].
  Walk(const double* columns, int64_t n, int64_t m, const double* weights, const double* targets);

  int64_t rows() const { return n_; }
  int64_t columns() const { return m_; }
  int64_t size() const { return static_cast<int64_t>(s_.size()); }
  // Of all columns, with room for more; invalidated by `add`.
  std::shared_ptr<double[]> store() const { return store_; }
  const std::vector<double>& coefficients() const { return w_; }
  const std::vector<int64_t>& basis() const { return s_; }
  const std::vector<int64_t>& tight() const { return e_; }
  const std::vector<double>& multipliers() const { return multipliers_; }
  const std::vector<char>& active() const { return active_; }
  double inverse(int64_t row, int64_t column) const { return inverse_[row * room_ + column]; }
  // Entry of the basis matrix, for a row of E and a column of S.
  double matrix(int64_t row, int64_t column) const { return edge_rows_[row * width_ + s_[column]]; }

  // Makes column j basic and row i tight without replacing others; `refresh` must follow.
  void pair(int64_t j, int64_t i);
  // Append columns [n, more], with coefficients of zero.
  void add(const double* columns, int64_t more);
  // Recomputes everything from the inverse of the matrix [size, size], row by row. With `reset`, the
  // coefficients alone decide which rows are inside the margin; otherwise rounding does not.
  void refresh(const double* inverse, bool reset);
  // Signs of zero coefficients at the start of a new minimisation.
  void begin();
  // At most `limit` pivots for the weights tau [m], none begun after `allowed` multiplications; adds to the
  // counters. After kRefresh, refresh and continue.
  Status minimise(const double* tau, int64_t limit, double allowed, int64_t* pivots, double* work);

 private:
  struct Edge {
    int64_t place = -1;                     // in E, of the leaving row
    int64_t entering = -1;                  // column that enters
    double slope = 0, sign = 0, speed = 0;  // speed: slope over the length of the edge
    std::vector<double> direction;          // of the coefficients S
  };
  struct Kink {
    double time, bend;
    int64_t index;  // a row, or rows() + a place in S
  };

  const double* column(int64_t j) const { return store_.get() + j * n_; }
  double* inverse_row(int64_t i) { return inverse_.data() + i * room_; }
  const double* edge_row(int64_t i) const { return edge_rows_.data() + i * width_; }
  void have_room(int64_t size);
  void have_width(int64_t columns);
  bool drifted() const;
  double work_of_pivot() const;
  void weigh(const double* tau);
  bool find_edge(const double* tau, Edge* edge);
  void price_columns(const double* tau, Edge* edge);
  void price_rows(Edge* edge);
  bool follow(const double* tau, const Edge& edge);
  void find_kinks(const double* tau, const Edge& edge);
  void cross(int64_t row, double change);
  void enter_row(int64_t row, const Edge& edge);
  void leave_coefficient(int64_t index, const Edge& edge);

  int64_t n_, m_, capacity_;
  std::shared_ptr<double[]> store_;
  std::vector<double> c_, t_;
  std::vector<int64_t> s_, e_;
  std::vector<char> tight_, basic_;              // by row, by column
  int64_t room_ = 0, width_ = 0;                 // of the two below
  std::vector<double> inverse_;                  // [room, room]
  std::vector<double> edge_rows_;                // [room, width], the rows E of all columns
  std::vector<double> w_, sign_, pull_, slack_;  // [m], [m], [m], [n]
  std::vector<double> multipliers_;              // [size], of the rows in E
  std::vector<char> active_;                     // [n], inside the margin, except those of E
  int64_t since_ = 0;                            // pivots since the last refresh
  bool fresh_ = false;                           // no pivots since
  std::vector<double> gain_, rates_, beside_;    // scratch
  std::vector<Kink> kinks_;
  std::vector<std::pair<int64_t, double>> crossed_;  // rows and the change of their weight in pull
};

}  // namespace oases::svm
