// Package stats says how measurements are spread over rounds.
package stats

import (
	"fmt"
	"slices"
)

// Spread is the range of some values, and the one in the middle.
type Spread struct{ Min, Median, Max float64 }

// SpreadOf returns the spread of at least one value.
func SpreadOf(values []float64) Spread {
	sorted := slices.Sorted(slices.Values(values))
	half := len(sorted) / 2
	median := sorted[half]
	if len(sorted)%2 == 0 {
		median = (sorted[half-1] + sorted[half]) / 2
	}
	return Spread{sorted[0], median, sorted[len(sorted)-1]}
}

func (s Spread) String() string {
	return fmt.Sprintf("%.2f / **%.2f** / %.2f", s.Min, s.Median, s.Max)
}
