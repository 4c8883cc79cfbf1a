package main

import (
	"fmt"
	"math"
	"os/exec"
	"regexp"
	"strings"

	"github.com/edgelimit/caddy-edgelimit/bench/internal/gobench"
)

// measureInProcess runs the benchmarks that some of what is to be reached is
// about.
func measureInProcess(report *report) error {
	product, err := moduleDirectory("github.com/edgelimit/caddy-edgelimit")
	if err != nil {
		return err
	}
	own, err := moduleDirectory("github.com/edgelimit/caddy-edgelimit/bench")
	if err != nil {
		return err
	}
	results, err := gobench.Run(product, "^(BenchmarkDecision|BenchmarkHandler)$/^(keys=1|allowed)$", "-count", "5", ".")
	if err != nil {
		return err
	}
	if err := judgeBenchmark(report, results, "Decision/keys=1", "one decision on a hot key, clock and hash included", 45, 0); err != nil {
		return err
	}
	if err := judgeBenchmark(report, results, "Handler/allowed", "the handler: resolve, one limit, one ceiling, forward", 1000, 3); err != nil {
		return err
	}
	return judgeLimiters(report, own)
}

// judgeBenchmark judges the time of one operation, in ns, and its allocations.
func judgeBenchmark(report *report, results gobench.Results, benchmark, what string, mostTime, mostAllocs float64) error {
	seconds, err := results.Median(benchmark, "sec/op")
	if err != nil {
		return err
	}
	allocs, err := results.Median(benchmark, "allocs/op")
	if err != nil {
		return err
	}
	report.judge(what, fmt.Sprintf("%.0f ns, %.0f allocations", mostTime, mostAllocs),
		fmt.Sprintf("%.0f ns, %.0f allocations", seconds*1e9, allocs), seconds*1e9 <= mostTime && allocs <= mostAllocs)
	return nil
}

// judgeLimiters compares one decision with the other limiters' at each number of
// keys, and looks at what a key takes.
func judgeLimiters(report *report, directory string) error {
	results, err := gobench.Run(directory, "^BenchmarkDecision$/././^threads=1$", "-count", "3", ".")
	if err != nil {
		return err
	}
	fmt.Println("\n## One decision, one thread")
	fmt.Println("\n| limiter | 1 key | 10,000 keys | 1,000,000 keys | heap a key |\n|---|---|---|---|---|")
	limiter := regexp.MustCompile(`^Decision/limiter=([^/]+)/keys=1/`)
	fastest := make(map[string]float64) // of the others, by number of keys
	best := make(map[string]string)
	counts := []string{"1", "10000", "1000000"}
	for name := range results.Find(limiter, "sec/op") {
		cells := make([]string, 0, len(counts)+1)
		for _, n := range counts {
			seconds, err := results.Median("Decision/limiter="+name+"/keys="+n+"/threads=1", "sec/op")
			if err != nil {
				return err
			}
			cells = append(cells, fmt.Sprintf("%.0f ns", seconds*1e9))
			if !isOurs(name) && (best[n] == "" || seconds < fastest[n]) {
				fastest[n], best[n] = seconds, name
			}
		}
		bytes, err := results.Median("Decision/limiter="+name+"/keys=1000000/threads=1", "heap-B/key")
		if err != nil {
			return err
		}
		fmt.Printf("| %s | %s | %.0f B |\n", name, strings.Join(cells, " | "), bytes)
	}
	for _, n := range counts {
		for _, ours := range []string{"edge_limit", "edge_limit-string"} {
			seconds, err := results.Median("Decision/limiter="+ours+"/keys="+n+"/threads=1", "sec/op")
			if err != nil {
				return err
			}
			report.judge(fmt.Sprintf("one decision, %s keys, %s", n, ours), "not slower than any other limiter",
				fmt.Sprintf("%.0f ns, %s %.0f ns", seconds*1e9, best[n], fastest[n]*1e9), seconds <= fastest[n])
		}
	}
	bytes, err := results.Median("Decision/limiter=edge_limit/keys=1000000/threads=1", "heap-B/key")
	if err != nil {
		return err
	}
	report.judge("memory of each of max_keys", "20 B", fmt.Sprintf("%.1f B", bytes), !math.IsNaN(bytes) && bytes <= 20)
	return nil
}

func isOurs(limiter string) bool { return strings.HasPrefix(limiter, "edge_limit") }

func moduleDirectory(path string) (string, error) {
	output, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", path).Output()
	if err != nil {
		return "", fmt.Errorf("looking for the module %s: %w (run this in bench/)", path, err)
	}
	return strings.TrimSpace(string(output)), nil
}
