package edgelimit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/edgelimit/caddy-edgelimit/internal/chain"
)

// newProbeCommand makes the command `caddy edge-limit probe`.
func newProbeCommand() *cobra.Command {
	var options probeOptions
	var expect string
	cmd := &cobra.Command{
		Use:   "probe <url>",
		Short: "Proves from outside that nobody can forge who the client is",
		Long: `
Asks the probe (the directive edge_limit_probe) at the URL who the client is:
once honestly, then with forged headers of all kinds, and compares the answers.
The addresses that are forged are of the ranges for documentation.

It connects directly, without any HTTP proxy, to one address of the host, and
follows no redirect: it names the URL to probe instead. More than fifty requests
are sent; limits count them.

Exit status:

  0   spoof-proof: no forged request changed the answer
  1   could not tell: nobody answers, no probe is there, a limit denies ...
  10  spoofable: a caller chooses who it is; the header that worked is named
  11  unresolved: honest callers cannot be told apart
  12  over-grouped: resolved to a proxy's address, or not as expected

Where several apply, 10 comes before 12, and 12 before 11.`,
		Example: `  $ caddy edge-limit probe https://example.com/client-ip
  $ caddy edge-limit probe --expect 198.51.100.22 https://example.com/client-ip
  $ caddy edge-limit probe --http1.1 --http2 --json https://example.com/client-ip`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if options.target, err = parseTarget(args[0]); err != nil {
				return err
			}
			if options.expect, err = parseExpected(expect); err != nil {
				return err
			}
			progress := io.Discard
			if term.IsTerminal(int(os.Stderr.Fd())) {
				progress = cmd.ErrOrStderr()
			}
			status, err := options.run(cmd.Context(), cmd.OutOrStdout(), progress)
			if err != nil {
				return err
			}
			return endWith(cmd, int(status))
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&options.json, "json", false, "print one JSON object with all that was sent and answered")
	flags.StringVar(&expect, "expect", "", "the address that you should be resolved to")
	flags.BoolVar(&options.insecure, "insecure", false, "accept any TLS certificate")
	flags.DurationVar(&options.timeout, "timeout", 10*time.Second, "how long an answer may take")
	flags.BoolVar(&options.http1, "http1.1", false, "speak HTTP/1.1 (with --http2: both, one after the other)")
	flags.BoolVar(&options.http2, "http2", false, "speak HTTP/2, which needs https")
	return cmd
}

// probeOptions are the command's arguments.
type probeOptions struct {
	target       *url.URL
	expect       netip.Addr
	json         bool
	insecure     bool
	timeout      time.Duration
	http1, http2 bool
}

// parseTarget reads the URL. One without a scheme is of https.
func parseTarget(text string) (*url.URL, error) {
	if !strings.Contains(text, "://") {
		text = "https://" + text
	}
	target, err := url.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("the URL cannot be read: %w", errors.Unwrap(err))
	}
	if target.Scheme != "http" && target.Scheme != "https" {
		return nil, fmt.Errorf("the URL begins with %q: only http and https can be probed", target.Scheme)
	}
	if target.Hostname() == "" {
		return nil, fmt.Errorf("the URL names no host: write it as https://example.com/client-ip")
	}
	if target.Path == "" {
		target.Path = "/"
	}
	target.Fragment, target.RawFragment = "", ""
	return target, nil
}

func parseExpected(text string) (netip.Addr, error) {
	if text == "" {
		return netip.Addr{}, nil
	}
	addr, ok := chain.ParseAddr(text)
	if !ok {
		return netip.Addr{}, fmt.Errorf("--expect %q: not an address", text)
	}
	return addr, nil
}

func (o *probeOptions) protocols() ([]protocolChoice, error) {
	if o.http2 && o.target.Scheme != "https" {
		return nil, errors.New("--http2 needs an https URL")
	}
	switch {
	case o.http1 && o.http2:
		return []protocolChoice{onlyHTTP1, onlyHTTP2}, nil
	case o.http1:
		return []protocolChoice{onlyHTTP1}, nil
	case o.http2:
		return []protocolChoice{onlyHTTP2}, nil
	}
	return []protocolChoice{negotiatedHTTP}, nil
}

// probeReport is all that was seen, for machines.
type probeReport struct {
	URL     string       `json:"url"`
	Verdict string       `json:"verdict"`
	Exit    probeVerdict `json:"exit"`
	Error   string       `json:"error,omitempty"`
	Runs    []*probeRun  `json:"runs"`
}

// run probes with each protocol and prints what it found. It returns an error
// where it could not tell.
func (o *probeOptions) run(ctx context.Context, stdout, progress io.Writer) (probeVerdict, error) {
	if o.timeout <= 0 {
		return verdictUnclear, fmt.Errorf("--timeout %v: must be above 0", o.timeout)
	}
	protocols, err := o.protocols()
	if err != nil {
		return verdictUnclear, err
	}
	report := probeReport{URL: o.target.Redacted(), Runs: []*probeRun{}}
	var findings []probeFinding
	for _, choice := range protocols {
		run := o.probe(ctx, choice, progress)
		report.Runs = append(report.Runs, run)
		findings = append(findings, run.Findings...)
	}
	report.Exit = gravestOf(findings)
	report.Verdict = report.Exit.String()
	if report.Exit == verdictUnclear {
		for _, f := range findings {
			if f.verdict == verdictUnclear && err == nil {
				err = fmt.Errorf("could not tell: %s", f.Says)
				report.Error = f.Says
			}
		}
	}
	if printErr := o.print(&report, stdout); printErr != nil {
		return verdictUnclear, printErr
	}
	return report.Exit, err
}

func (o *probeOptions) print(report *probeReport, stdout io.Writer) error {
	if o.json {
		encoder := json.NewEncoder(stdout)
		encoder.SetEscapeHTML(false)
		encoder.SetIndent("", "  ")
		return encoder.Encode(report)
	}
	for i, run := range report.Runs {
		if i > 0 {
			fmt.Fprintln(stdout)
		}
		if err := run.print(report.URL, stdout); err != nil {
			return err
		}
	}
	return nil
}

// probe sends the plain request, the forged ones, and the plain one again.
func (o *probeOptions) probe(ctx context.Context, choice protocolChoice, progress io.Writer) *probeRun {
	s := newProbeSender(o.target, choice, o.insecure, o.timeout)
	defer s.close()
	kinds := forgeryKinds()
	run := &probeRun{expect: o.expect, own: ownAddresses()}
	done := 0
	send := func(f forgery) *probeExchange {
		done++
		fmt.Fprintf(progress, "\r\x1b[K%d of %d: %s", done, max(done, len(kinds)+2), f.title)
		e := s.send(ctx, f)
		run.Exchanges = append(run.Exchanges, e)
		return e
	}

	plain := send(forgery{title: "nothing"})
	plain.Outcome = fatePlain
	local, remote := s.ends()
	run.Protocol, run.Address, run.From = s.protocol, remote.String(), local.Addr().String()
	run.local, run.remote = local.Addr(), remote.Addr()
	if plain.trouble == nil || plain.trouble.kind == troubleDenied {
		o.forge(run, s, kinds, send)
	}
	fmt.Fprint(progress, "\r\x1b[K")
	run.judge()
	return run
}

// forge sends the forged requests, until one gets no answer that tells anything.
func (o *probeOptions) forge(run *probeRun, s *probeSender, kinds []forgeryKind, send func(forgery) *probeExchange) {
	claimant := &claimant{honest: run.plain().resolved}
	rotated := map[string]bool{headerForwardedFor: true} // the kinds do that themselves
	for _, kind := range kinds {
		if kind.http1 && strings.HasPrefix(s.protocol, "HTTP/2") {
			f := kind.forge(claimant)
			run.Exchanges = append(run.Exchanges, &probeExchange{Title: f.title, Headers: f.lines, Outcome: fateNotSent})
			continue
		}
		e := send(kind.forge(claimant))
		run.judgeForged(e)
		if e.Believed != "" && !rotated[e.Believed] {
			// whoever can name another address each time has a new budget each time
			rotated[e.Believed] = true
			again := kind.forge(claimant)
			again.title += ", another address"
			e = send(again)
			run.judgeForged(e)
		}
		if e.Outcome == fateFailed {
			return
		}
	}

	// The honest answer is asked for again: one that changes by itself compares
	// with nothing. Where something changed it, it gets more chances to.
	repeats := 1
	if run.first(fateBelieved) == nil && (run.first(fateChanged) != nil || run.first(fateUnresolved) != nil) {
		repeats = 6
	}
	for range repeats {
		again := send(forgery{title: "nothing, again"})
		again.Outcome = fatePlain
		if again.trouble != nil && run.plain().trouble == nil {
			again.Outcome = fateFailed
			return
		}
	}
}

// print writes the table, the verdicts and what to do.
func (r *probeRun) print(target string, stdout io.Writer) error {
	if len(r.Exchanges) == 1 {
		return nil // no probe: the error says so
	}
	fmt.Fprintf(stdout, "%s at %s, from %s, over %s\n\n", target, r.Address, r.From, r.Protocol)
	table := tabwriter.NewWriter(stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "FORGED\tSENT\tRESOLVED\tSOURCE\tREASON\tRESULT")
	for _, e := range r.Exchanges {
		resolved, source, reason, result := "", "", "", string(e.Outcome)
		if e.Answer != nil {
			resolved, source, reason = e.shownResolved(), printable(e.Answer.Source, maxWord), printable(e.Answer.Reason, maxWord)
		}
		switch e.Outcome {
		case fatePlain:
			result = ""
		case fateBelieved, fateChanged:
			result = strings.ToUpper(result)
		}
		if e.trouble != nil && e.Status != 0 {
			result = strings.TrimSpace(fmt.Sprintf("%s (status %d)", result, e.Status))
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\n", e.Title, orDash(e.shownLines()), orDash(resolved), orDash(source), orDash(reason), orDash(result))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for _, f := range r.Findings {
		if f.verdict == verdictUnclear {
			continue // the error says so
		}
		fmt.Fprintf(stdout, "\n%s: %s.\n", strings.ToUpper(f.Verdict), f.Says)
		if f.Mend != "" {
			fmt.Fprintf(stdout, "  Mend: %s.\n", printable(f.Mend, maxSentence))
		}
	}
	for _, remark := range r.Remarks {
		fmt.Fprintf(stdout, "  Note: %s.\n", remark)
	}
	return nil
}

// maxColumn is how much of a header the table shows, in bytes.
const maxColumn = 40

func (e *probeExchange) shownLines() string {
	if e.Preamble != "" {
		return printable(strings.TrimSpace(e.Preamble), maxColumn)
	}
	if len(e.Headers) == 0 {
		return ""
	}
	more := ""
	if n := len(e.Headers) - 1; n > 0 {
		more = fmt.Sprintf(" +%d", n)
	}
	return printable(e.Headers[0].String(), maxColumn-len(more)) + more
}

func orDash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}
