package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/edgelimit/caddy-edgelimit/bench/internal/stats"
)

// report collects what was measured, and whether what is to be reached is.
type report struct {
	verdicts []verdict
}

type verdict struct {
	what, atLeast, measured string
	pass                    bool
}

func (r *report) judge(what, atLeast, measured string, pass bool) {
	r.verdicts = append(r.verdicts, verdict{what, atLeast, measured, pass})
}

// print writes the table of what is to be reached.
func (r *report) print() {
	if len(r.verdicts) == 0 {
		return
	}
	fmt.Println("\n## Reach")
	fmt.Println("\n| what | to reach | measured | |\n|---|---|---|---|")
	for _, v := range r.verdicts {
		word := "**misses**"
		if v.pass {
			word = "reaches"
		}
		fmt.Printf("| %s | %s | %s | %s |\n", v.what, v.atLeast, v.measured, word)
	}
}

// servers writes the table of the servers, and judges its rows.
func (r *report) servers(measured []row, results map[string][]measurement) {
	fmt.Println("\n## Servers")
	fmt.Println("\n| server | compared with | throughput (min / median / max) | by CPU a request | requests a second | CPU a request | its core | collections in 100k |\n|---|---|---|---|---|---|---|---|")
	throughput := make(map[string]stats.Spread)
	for _, row := range measured {
		own, other := results[row.server.name], results[row.against.name]
		if len(own) == 0 || len(other) == 0 {
			continue
		}
		ratios, byCPU := make([]float64, len(own)), make([]float64, len(own))
		for i := range own {
			ratios[i] = own[i].perSecond / other[i].perSecond
			byCPU[i] = float64(other[i].cpu) / float64(own[i].cpu)
		}
		ratio := stats.SpreadOf(ratios)
		throughput[row.server.name] = ratio
		fmt.Printf("| %s | %s | %s | %s | %.0f | %.2f us | %.0f %% | %.1f |\n", row.server.name, row.against.name, ratio, stats.SpreadOf(byCPU),
			stats.SpreadOf(perMeasurement(own, func(m measurement) float64 { return m.perSecond })).Median,
			stats.SpreadOf(perMeasurement(own, func(m measurement) float64 { return float64(m.cpu) / 1000 })).Median,
			stats.SpreadOf(perMeasurement(own, func(m measurement) float64 { return 100 * m.busy })).Median,
			stats.SpreadOf(perMeasurement(own, func(m measurement) float64 { return m.collections })).Median)
		if row.atLeast > 0 {
			text := fmt.Sprintf("%s, by CPU %.2f", ratio, stats.SpreadOf(byCPU).Median)
			if floor, ok := throughput[row.floor]; ok {
				text += fmt.Sprintf("; %s: %.2f", row.floor, floor.Median)
			}
			r.judge(row.server.name+", end to end", fmt.Sprintf("%.2f of %s", row.atLeast, row.against.name), text, ratio.Median >= row.atLeast)
		}
	}
}

func perMeasurement(ms []measurement, f func(measurement) float64) (values []float64) {
	for _, m := range ms {
		values = append(values, f(m))
	}
	return values
}

// floods writes the table of the flood, and judges it.
func (r *report) floods(kinds []string, results map[string][]floodWindow, window, maxKeys int) {
	fmt.Printf("\n## Flood: a fresh key in each request\n\nBy %s requests, at most %d keys.\n", number(window), maxKeys)
	fmt.Println("\n| until | bare, requests a second | edge_limit | ratio | CPU a request, bare | edge_limit | RSS, bare | edge_limit | worst latency, bare | edge_limit | collections in 100k, bare | edge_limit |")
	fmt.Println("|---" + strings.Repeat("|---", 11) + "|")
	bares, ours := results[kinds[0]], results[kinds[1]]
	var ratios []float64
	for i := range ours {
		b, o := bares[i], ours[i]
		ratios = append(ratios, o.perSecond/b.perSecond)
		fmt.Printf("| %s | %.0f | %.0f | %.2f | %.2f us | %.2f us | %d MB | %d MB | %.1f ms | %.1f ms | %.1f | %.1f |\n", number((i+1)*window),
			b.perSecond, o.perSecond, ratios[i], float64(b.cpu)/1000, float64(o.cpu)/1000, b.rss>>20, o.rss>>20,
			milliseconds(b.worst), milliseconds(o.worst), b.collections, o.collections)
	}
	last := len(ours) - 1
	if window < leastFlood/floodWindows {
		fmt.Println("\nToo short a flood to judge: one collection more or less decides.")
		return
	}
	ratio := stats.SpreadOf(ratios)
	r.judge("flood: a fresh key in each request, throughput", "0.93 of bare", ratio.String(), ratio.Median >= 0.93)

	noise := stats.SpreadOf(perWindow(bares, func(w floodWindow) float64 { return w.perSecond / bares[0].perSecond }))
	kept := ours[last].perSecond / ours[0].perSecond
	r.judge("flood: flat from the first part to the last", fmt.Sprintf("within what bare varies, at least %.2f of the first", noise.Min/noise.Max),
		fmt.Sprintf("%.2f of the first", kept), kept >= noise.Min/noise.Max)

	full := (len(ours) - 1) / 2
	grown := float64(ours[last].rss) / float64(ours[full].rss)
	r.judge("flood: memory fixed", "RSS in the end at most 1.05 of halfway, when the table has long been full",
		fmt.Sprintf("%.2f (%d MB, bare %d MB)", grown, ours[last].rss>>20, bares[last].rss>>20), grown <= 1.05)

	worst := func(ws []floodWindow) float64 {
		return stats.SpreadOf(perWindow(ws, func(w floodWindow) float64 { return milliseconds(w.worst) })).Max
	}
	r.judge("flood: worst latency", "at most twice that of bare", fmt.Sprintf("%.1f ms, bare %.1f ms", worst(ours), worst(bares)), worst(ours) <= 2*worst(bares))
}

func perWindow(ws []floodWindow, f func(floodWindow) float64) (values []float64) {
	for _, w := range ws {
		values = append(values, f(w))
	}
	return values
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// number writes a number of requests.
func number(n int) string {
	switch {
	case n%1_000_000 == 0:
		return fmt.Sprintf("%d million", n/1_000_000)
	case n%1000 == 0:
		return fmt.Sprintf("%d thousand", n/1000)
	}
	return fmt.Sprint(n)
}
