// Command plot draws what edge_limit costs as work grows, from the output of the
// benchmarks:
//
//	go test -run '^$' -bench 'Chain|Handler' -cpu 1,2 -count 5 .. > root.txt
//	go test -run '^$' -bench Decision -count 5 . > decision.txt
//	go run ./plot -out ../docs/performance root.txt decision.txt
//
// Each point is the median of its runs, and the bars reach from the least to the
// most.
package main

import (
	"flag"
	"fmt"
	"image/color"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/edgelimit/caddy-edgelimit/bench/internal/gobench"
)

func main() {
	out := flag.String("out", "../docs/performance", "directory of the drawings")
	flag.Parse()
	if err := run(*out, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "plot:", err)
		os.Exit(1)
	}
}

func run(out string, files []string) error {
	results := make(gobench.Results)
	for _, name := range files {
		file, err := os.Open(name)
		if err != nil {
			return fmt.Errorf("opening results: %w", err)
		}
		err = results.Read(file, name)
		file.Close()
		if err != nil {
			return fmt.Errorf("reading %s: %w", name, err)
		}
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return fmt.Errorf("making the directory: %w", err)
	}
	for _, d := range drawings {
		if err := d.draw(results, filepath.Join(out, d.file)); err != nil {
			return fmt.Errorf("drawing %s: %w", d.file, err)
		}
	}
	return nil
}

// drawing is one file: some lines over how much work there is.
type drawing struct {
	file, title, x, y string
	logX, logY        bool
	ticks             []float64
	lines             []line
}

// line takes from the names of benchmarks how much work each had.
type line struct {
	name    string
	pattern *regexp.Regexp // its submatch is a number
}

var drawings = []drawing{
	{
		file: "limits.svg", title: "The handler, by the number of limits on a route", x: "limits", y: "ns a request",
		ticks: []float64{1, 4, 16},
		lines: []line{{"handler", regexp.MustCompile(`^Handler/limits=(\d+)(?:-\d+)?$`)}},
	},
	{
		file: "headers.svg", title: "The handler without limits, by ordinary headers in the request", x: "headers", y: "ns a request",
		ticks: []float64{5, 15, 40},
		lines: []line{{"resolve, remove, forward", regexp.MustCompile(`^Handler/headers=(\d+)(?:-\d+)?$`)}},
	},
	{
		file: "chain.svg", title: "Resolving, by the length of the chain", x: "entries (1587 of them are 16 KB)", y: "ns a request", logX: true, logY: true,
		ticks: []float64{1, 16, 64, 1587},
		lines: []line{
			{"all of trusted proxies, read up to 64", regexp.MustCompile(`^Chain/read/entries=(\d+)(?:-\d+)?$`)},
			{"written by the caller, not read", regexp.MustCompile(`^Chain/forged/entries=(\d+)(?:-\d+)?$`)},
		},
	},
	{
		file: "keys.svg", title: "One decision, by the number of keys", x: "keys", y: "ns a decision", logX: true, logY: true,
		ticks: []float64{1, 10_000, 1_000_000, 16_000_000},
		lines: []line{
			{"edge_limit, by address", decisions("edge_limit")},
			{"edge_limit, by text", decisions("edge_limit-string")},
			{"go-limiter", decisions("go-limiter")},
			{"throttled", decisions("throttled")},
			{"httprate", decisions("httprate")},
			{"x/time/rate in a sync.Map", decisions("xtimerate-syncmap")},
			{"ulule", decisions("ulule")},
		},
	},
	{
		file: "cores.svg", title: "The handler on several cores", x: "cores", y: "ns a request, of wall time", ticks: []float64{1, 2},
		lines: []line{
			{"many keys", regexp.MustCompile(`^HandlerParallel/keys(?:-(\d+))?$`)},
			{"one hot key", regexp.MustCompile(`^HandlerParallel/hotkey(?:-(\d+))?$`)},
			{"one ceiling", regexp.MustCompile(`^HandlerParallel/ceiling(?:-(\d+))?$`)},
		},
	},
}

func decisions(limiter string) *regexp.Regexp {
	return regexp.MustCompile(`^Decision/limiter=` + limiter + `/keys=(\d+)/threads=1(?:-\d+)?$`)
}

func (d *drawing) draw(results gobench.Results, file string) error {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = d.title, d.x, d.y
	p.Title.Padding = vg.Points(6)
	p.BackgroundColor = color.White // readable on dark pages too
	p.Legend.Top, p.Legend.Left, p.Legend.Padding = true, true, vg.Points(2)
	p.Add(plotter.NewGrid())
	if d.logX {
		p.X.Scale = plot.LogScale{}
	}
	if d.logY {
		p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	}
	p.X.Tick.Marker = plot.ConstantTicks(ticksAt(d.ticks))
	for i, line := range d.lines {
		points := line.points(results)
		if n := len(points.XYs); n < 2 {
			return fmt.Errorf("results of %d points match %s: a curve needs two", n, line.pattern)
		}
		if err := add(p, line.name, points, i); err != nil {
			return err
		}
	}
	if !d.logY {
		p.Y.Min = 0
	}
	p.Y.Max *= map[bool]float64{false: 1.3, true: 4}[d.logY] // room for the legend
	return p.Save(16*vg.Centimeter, 10*vg.Centimeter, file)
}

func ticksAt(values []float64) (ticks []plot.Tick) {
	for _, value := range values {
		ticks = append(ticks, plot.Tick{Value: value, Label: strconv.FormatFloat(value, 'f', -1, 64)})
	}
	return ticks
}

// points are medians with the least and the most beside them.
type points struct {
	plotter.XYs
	plotter.YErrors
}

func (l *line) points(results gobench.Results) (ps points) {
	found := results.Find(l.pattern, "sec/op")
	work := make(map[float64][]float64)
	for text, values := range found {
		x, err := strconv.ParseFloat(text, 64)
		if err != nil {
			x = 1 // without a suffix: one core
		}
		work[x] = append(work[x], values...)
	}
	var xs []float64
	for x, values := range work {
		if len(values) > 0 {
			xs = append(xs, x)
		}
	}
	slices.Sort(xs)
	for _, x := range xs {
		values := slices.Sorted(slices.Values(work[x]))
		median := values[len(values)/2] * 1e9
		ps.XYs = append(ps.XYs, plotter.XY{X: x, Y: median})
		ps.YErrors = append(ps.YErrors, struct{ Low, High float64 }{median - values[0]*1e9, values[len(values)-1]*1e9 - median})
	}
	return ps
}

func add(p *plot.Plot, name string, ps points, i int) error {
	curve, marks, err := plotter.NewLinePoints(ps.XYs)
	if err != nil {
		return fmt.Errorf("drawing %s: %w", name, err)
	}
	bars, err := plotter.NewYErrorBars(ps)
	if err != nil {
		return fmt.Errorf("drawing the bars of %s: %w", name, err)
	}
	curve.Color, marks.Color, bars.Color = plotutil.Color(i), plotutil.Color(i), plotutil.Color(i)
	curve.Width, marks.Shape, marks.Radius = vg.Points(1.5), draw.CircleGlyph{}, vg.Points(2.5)
	p.Add(curve, marks, bars)
	p.Legend.Add(name, curve, marks)
	return nil
}
