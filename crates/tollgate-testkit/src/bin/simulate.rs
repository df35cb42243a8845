fn main() {
    let args: Vec<u64> = std::env::args().skip(1).map(|a| a.parse().unwrap()).collect();
    if args.len() == 1 {
        let r = tollgate_testkit::simulation::tell(args[0]);
        for l in &r.timeline {
            println!("{l}");
        }
        println!("{:?}", r.violations);
        return;
    }
    for f in tollgate_testkit::simulation::Flaw::ALL {
        let c: Vec<_> = (0..300)
            .map(|s| tollgate_testkit::simulation::play_flawed(s, f))
            .filter(|r| !r.violations.is_empty())
            .collect();
        println!(
            "{f:?} caught in {} of 300, first {:?} {:?}",
            c.len(),
            c.first().map(|r| r.seed),
            c.first().map(|r| r.violations[0].clone())
        );
    }
    let mut by: std::collections::BTreeMap<String, (u64, u64)> = Default::default();
    for s in args[0]..args[1] {
        if std::env::var_os("V").is_some() {
            eprintln!("{s}");
        }
        let r = tollgate_testkit::simulation::play(s);
        if let Some(v) = r.violations.first() {
            let e = by
                .entry(format!(
                    "{} / {} / {}",
                    v.invariant.as_str(),
                    r.trouble.as_str(),
                    r.consistency.as_str()
                ))
                .or_insert((0, s));
            if e.0 == 0 {
                println!("{s} {} {} {v:?} n={}", r.trouble.as_str(), r.consistency.as_str(), r.events);
            }
            e.0 += 1;
        }
    }
    println!("{by:#?}");
}
