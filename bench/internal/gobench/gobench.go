// Package gobench runs Go benchmarks and reads their output.
package gobench

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"

	"golang.org/x/perf/benchfmt"
)

// Results are measurements by benchmark, without the suffix of the processors,
// and unit: seconds are "sec/op".
type Results map[string]map[string][]float64

// Run runs the benchmarks of the package in a directory.
func Run(directory, benchmarks string, arguments ...string) (Results, error) {
	command := exec.Command("go", append([]string{"test", "-run", "^$", "-bench", benchmarks, "-benchmem"}, arguments...)...)
	command.Dir = directory
	command.Stderr = os.Stderr
	output, err := command.Output()
	if err != nil {
		return nil, fmt.Errorf("running the benchmarks in %s: %w\n%s", directory, err, output)
	}
	results := make(Results)
	return results, results.Read(bytes.NewReader(output), "go test")
}

// Read adds what a run of `go test -bench` wrote.
func (results Results) Read(r io.Reader, name string) error {
	reader := benchfmt.NewReader(r, name)
	for reader.Scan() {
		result, ok := reader.Result().(*benchfmt.Result)
		if !ok {
			continue
		}
		name := result.Name.String()
		if results[name] == nil {
			results[name] = make(map[string][]float64)
		}
		for _, value := range result.Values {
			results[name][value.Unit] = append(results[name][value.Unit], value.Value)
		}
	}
	return reader.Err()
}

// Median is the median of a benchmark's measurements.
func (results Results) Median(benchmark, unit string) (float64, error) {
	for _, name := range []string{benchmark, benchmark + "-1", benchmark + "-2"} {
		if values := results[name][unit]; len(values) > 0 {
			sorted := slices.Sorted(slices.Values(values))
			return sorted[len(sorted)/2], nil
		}
	}
	return 0, fmt.Errorf("there is no result of %s in %s", benchmark, unit)
}

// Find returns the results whose names match, by their first submatch.
func (results Results) Find(pattern *regexp.Regexp, unit string) map[string][]float64 {
	found := make(map[string][]float64)
	for name, units := range results {
		if match := pattern.FindStringSubmatch(name); match != nil {
			found[match[1]] = append(found[match[1]], units[unit]...)
		}
	}
	return found
}
